"""Printed graphs, JSON, pictures and generated CUDA, compared with reviewed files.

--update-golden writes the files anew.
"""

import pytest

import mirage_hf as mi
from mirage_hf.codegen import cuda
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.render import picture
from tests.helpers import cluster_ugraphs, programs, ugraphs

SHOWN = {
    **{n: ugraphs.ALL[n] for n in ("rms_norm_linear", "gated_mlp", "attention", "split_k_linear")},
    "cluster_rms_norm_linear": cluster_ugraphs.rms_norm_linear,
}


@pytest.mark.parametrize("name", SHOWN)
def test_printed_ugraph(name, golden):
    golden(f"text/{name}.txt", str(SHOWN[name]()) + "\n")


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_printed_program(name, golden):
    golden(f"text/program_{name}.txt", str(programs.build(mi, name, small=False)) + "\n")


@pytest.mark.parametrize("name", SHOWN)
def test_json(name, golden):
    golden(f"json/{name}.json", SHOWN[name]().to_json())


@pytest.mark.parametrize("name", SHOWN)
def test_picture(name, golden):
    golden(f"svg/{name}.svg", picture.svg(SHOWN[name]()))


def test_picture_of_a_library_path(golden):
    golden(
        "svg/program_qk_norm_attention.svg",
        picture.svg(library_ugraph(programs.build(mi, "qk_norm_attention", small=False))),
    )


@pytest.mark.parametrize("name", SHOWN)
def test_cuda(name, golden):
    """The helpers and the check are left out, because they are the same in every file."""
    text = cuda.program_source(SHOWN[name]())
    golden(
        f"cuda/{name}.cu",
        text[text.index("// axes") : text.index("#ifdef MIRAGE_CHECK\n// -- the program")],
    )
