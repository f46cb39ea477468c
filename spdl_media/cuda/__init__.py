"""Work on a CUDA device: colour, images and videos. Nothing here is imported before it is used."""
