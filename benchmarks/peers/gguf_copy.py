"""The model's GGUF file with its matrices in another type, made once, kept in this environment."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind

KINDS = {"float32": Kind.F32, "bfloat16": Kind.BF16}


def gguf_of(source: str, dtype: str) -> Path:
    """Return the path of a copy of ``source`` in ``dtype``; vectors stay float32."""
    target = Path(sys.prefix) / f"{Path(source).stem}.{dtype}.gguf"
    if target.is_file():
        return target
    reader = gguf.GGUFReader(source)
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = KINDS[dtype] if values.ndim == 2 else Kind.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target
