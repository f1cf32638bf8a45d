"""Opens every rank file of a checkpoint with safetensors and holds each tensor's bytes against the rank's manifest.

usage: open_ranks.py DIR
"""
import json
import pathlib
import sys

import ml_dtypes  # gives numpy its bfloat16
import numpy as np
from safetensors import safe_open

ARRAYS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def main():
    directory = pathlib.Path(sys.argv[1])
    checkpoint = json.loads((directory / "checkpoint.json").read_text())
    tensors = 0
    for rank_file in checkpoint["rank_files"]:
        manifest = json.loads((directory / rank_file["manifest"]).read_text())
        raw = (directory / rank_file["file"]).read_bytes()
        with safe_open(directory / rank_file["file"], framework="np") as file:
            names = {entry["name"] for entry in manifest["tensors"]}
            assert set(file.keys()) == names, set(file.keys()) ^ names
            metadata = file.metadata()
            assert (metadata["rank"], metadata["ranks"]) == (str(manifest["rank"]), str(manifest["ranks"])), metadata
            for entry in manifest["tensors"]:
                tensor = file.get_tensor(entry["name"])
                plain = ARRAYS.get(entry["dtype"])
                assert tensor.dtype == np.dtype(plain or "u1"), (entry["name"], tensor.dtype)
                shape = tuple(entry["shape"])
                assert tensor.shape == shape if plain else tensor.shape[:-1] == shape[:-1], (entry["name"], tensor.shape)
                start, end = entry["bytes"]
                assert tensor.tobytes() == raw[start:end], entry["name"]
                tensors += 1
    print(f"{len(checkpoint['rank_files'])} rank files, {tensors} tensors")


main()
