"""The torch binding: custom ops on the framework-free kernels of `nvalchemiops`."""

import torch

from nvalchemiops.launch import set_openmp, set_thread_count
from nvalchemiops.torch.runtime.openmp import adapt_threads as adapt_threads
from nvalchemiops.torch.runtime.openmp import openmp_of_torch

set_thread_count(torch.get_num_threads)
set_openmp(openmp_of_torch())
