"""Loads FILE to GPU number GPU with LOADER and prints the seconds: python loading.py LOADER FILE GPU (loading.rs calls this)."""
import sys
import time

import torch

loader, file, gpu = sys.argv[1:]
device = f"cuda:{gpu}"
if loader == "safetensors":
    from safetensors.torch import load_file
else:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup
torch.zeros(1, device=device)
torch.cuda.synchronize(device)
started = time.perf_counter()
if loader == "safetensors":
    tensors = load_file(file, device=device)
else:
    files = SafeTensorsFileLoader(SingleGroup(), torch.device(device), nogds=True)
    files.add_filenames({0: [file]})
    buffers = files.copy_files_to_device()
    tensors = {name: buffers.get_tensor(name) for name in files.get_keys()}
torch.cuda.synchronize(device)
assert tensors
print(time.perf_counter() - started)
