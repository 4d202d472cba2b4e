"""In which dtype a checkpoint computes."""

from __future__ import annotations

import torch

from rcd.errors import unknown_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = (*dict.fromkeys(DTYPES.values()), torch.float64)
"""Those that decoding computes in."""
LARGE = 100_000_000
"""Parameters from which bf16 is worth it: at 150 million a step takes about a quarter of the time."""
NATIVE = ("avx512_bf16", "amx_bf16", "bf16")
"""What torch calls the instructions that multiply bf16: of AVX-512, of AMX, of Arm."""


def native_bf16() -> bool:
    """Whether this machine's CPU computes in bf16; without such instructions it is several times slower than fp32."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in NATIVE)


def pick_dtype(
    dtype: str | torch.dtype | None, stored: torch.dtype, device: torch.device, parameters: int = 0
) -> torch.dtype:
    """auto: as stored, but on a CPU fp32, unless it is a large model (`parameters`) in bf16 and the chip computes in
    bf16. That is a question of the chip and the model, never of a timing, so that a machine always gives one answer."""
    if isinstance(dtype, torch.dtype):
        if dtype not in FLOATS:
            raise unknown_name("dtype", str(dtype), map(str, FLOATS))
        return dtype
    if dtype is None or dtype == "auto":
        if device.type != "cpu":
            return stored
        kept = stored == torch.bfloat16 and parameters >= LARGE and native_bf16()
        return stored if kept else torch.float32
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]


def wide(dtype: torch.dtype) -> torch.dtype:
    """fp32, or the dtype itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)
