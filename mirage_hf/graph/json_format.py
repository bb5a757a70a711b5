"""The JSON format of graphs: versioned, stable, floats exact.

`KernelGraph.to_json` and `UGraph.to_json` write this format. `mirage_hf.load_graph` and
`mirage_hf.load_ugraph` read it. A program can also be written by hand or by another tool. This one
is relu(x · w):

```json
{
  "format": "mirage_hf.graph",
  "version": 1,
  "nodes": [
    {"op": "input", "name": "x", "dtype": "float16", "dims": [16, 4096], "strides": [4096, 1]},
    {
      "op": "input",
      "name": "w",
      "dtype": "float16",
      "dims": [4096, 1024],
      "strides": [1, 4096],
      "constant": true
    },
    {
      "op": "matmul",
      "inputs": ["x", "w"],
      "attrs": {},
      "outputs": [{"name": "y", "dtype": "float16", "dims": [16, 1024]}]
    },
    {
      "op": "relu",
      "inputs": ["y"],
      "attrs": {},
      "outputs": [{"name": "z", "dtype": "float16", "dims": [16, 1024]}]
    }
  ],
  "outputs": ["z"]
}
```

A file has these fields:

- `format`: what the file holds. "mirage_hf.graph" is a kernel graph. "mirage_hf.ugraph" is a µGraph
  with the kernel graphs `program` and `kernels`. "mirage_hf.block" is a block graph.
- `version`: 1 or 2. Version 2 renamed some fields of block graphs, which are listed at the end.
  Readers take both versions.

A kernel graph has:

- `nodes`: its inputs and ops. A node comes after those that it reads.
- `outputs`: the names of its output tensors.

A node with `op` "input" is an input:

- `name`: an identifier that no other tensor has.
- `dtype`: "float16", "bfloat16", "float32", "int32" or "int64", or for codes that "cast" reads
  "uint4", "int4", "uint8", "int8", "float8_e4m3fn" or "float8_e8m0fnu". Eight codes of 4 bits fill
  an int32 word, lowest bits first. A uint8 tensor holds "float8_e8m0fnu".
- `dims`: sizes. A symbolic dim is `{"dim": name, "max": size}`.
- `strides`: a stride per dim, in elements. [1, 4096] reads the weight of an nn.Linear transposed.
- `constant` (optional): true for weights, which nothing writes while kernels run.

Any other node is an op:

- `op`: its name in the op table, or "customized" for a kernel that runs a block graph.
- `inputs`: names of tensors. Elementwise ops take numbers too; an infinity is `{"number": "inf"}`.
- `attrs`: its attributes by name, such as `{"dim": 1, "kind": "sum"}`.
- `block`: the block graph of a "customized" op, which has no `attrs`.
- `outputs`: name, dtype and dims of each result. They must agree with the op.

A block graph has `axes`, `inputs`, `stages` and `outputs`, which are lists of objects. Their fields
are those of the classes in `graph/block_parts.py`, with these forms:

- An axis has `name`, `size`, `role` ("grid", "cluster", "loop" or "tile"), and `split_axis` if it
  is split.
- An input has `name`, `sources`, `axes` (null: the dim has size 1), `joined` and `sizes`. It may
  have `bounds`, `rotation`, `padding` and `taken`. A rotation has `axis` and `how`, and may have
  `width`. A padding has `axis`, `size` and `value`. If an index chooses the elements of a dim,
  `taken` has `dim`, its `size`, the operand `index`, and the `axes` of the index.
- A stage has `loop` (null: it runs once), `body` and `accumulators`. An op of the body has `out`,
  `fn`, `args`, `axes`, `attrs` and `over`. An accumulator has `out`, `arg`, `kind` and `axes`, and
  may have `shift`.
- An output has `value`, `axes` and `dtype`.

In version 1, `split_axis` was called `parts`, and a rotation was `"turn": [axis, how]` with the
width in `turned`.
"""

from __future__ import annotations

from mirage_hf.graph.json_files import Json, digest, save_json
from mirage_hf.graph.json_reader import (
    block_from_dict,
    graph_from_dict,
    load_graph,
    load_ugraph,
    ugraph_from_dict,
)
from mirage_hf.graph.json_writer import (
    BLOCK,
    GRAPH,
    UGRAPH,
    VERSION,
    block_to_dict,
    graph_to_dict,
    ugraph_to_dict,
)

__all__ = [
    "BLOCK",
    "GRAPH",
    "UGRAPH",
    "VERSION",
    "Json",
    "block_from_dict",
    "block_to_dict",
    "digest",
    "graph_from_dict",
    "graph_to_dict",
    "load_graph",
    "load_ugraph",
    "save_json",
    "ugraph_from_dict",
    "ugraph_to_dict",
]
