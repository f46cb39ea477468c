"""Work on CUDA devices: colour conversion, images and videos. Modules are imported at first use."""
