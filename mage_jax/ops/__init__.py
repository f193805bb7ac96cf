"""Array operations: attention, rotary, norms, vocabulary loss. Importing it makes the structs of ``types`` pytrees."""

import dataclasses

import jax

from mage_jax import types

for _struct in (types.PackedRows, types.TrainBatch):
    jax.tree_util.register_dataclass(_struct, data_fields=[f.name for f in dataclasses.fields(_struct)], meta_fields=[])
