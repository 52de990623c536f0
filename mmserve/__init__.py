"""mmserve: an inference server for diffusion language models and multimodal models, over gRPC and HTTP."""

__version__ = "0.1.0"
