"""mmserve: a gRPC server for diffusion language models and multimodal models."""

__version__ = "0.1.0"
