"""The torch binding: custom ops on the framework-free kernels of `nvalchemiops`."""

import torch

from nvalchemiops.launch import set_thread_count

set_thread_count(torch.get_num_threads)
