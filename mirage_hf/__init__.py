from mirage_hf.graph.kernel import new_kernel_graph
from torch import float16, bfloat16, float32
new_graph = new_kernel_graph
