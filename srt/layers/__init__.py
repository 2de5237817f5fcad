"""Building blocks of the models, over the kernels of sgl_kernel."""
