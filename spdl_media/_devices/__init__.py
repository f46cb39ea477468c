"""CUDA devices behind one small interface, which PyTorch or CuPy fills, and none of them before it is used.

``device``       what a device must do, and what is common to all
``forks``        whether CUDA can work in this process at all
``own_streams``  a stream for each thread, for as long as it lives
``torch_device`` a stream of a device through PyTorch
``cupy_device``  the same through CuPy, with kernels
``memory``       memory that goes back only after the streams that read it
``keeper``       host memory that is kept until a device has read it
``handover``     from the stream that fills an array to those that read it
``choose``       which of the two libraries, and why none
``driver``       what only the driver can say
"""
