"""Generated from protos/mmserve/v1; see CONTRIBUTING."""
