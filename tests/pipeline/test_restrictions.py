"""Restrictions by the user, and the reason of each rejection.

There are restrictions of tensor maps, of numbers of blocks, threads and trips, of kernels and of
time.
"""

from __future__ import annotations

import math

import pytest

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph.block import Role
from mirage_hf.graph.maps import maps_of
from mirage_hf.pipeline import superoptimizer_options
from mirage_hf.search.engine import search
from mirage_hf.search.map_restriction import MapRestriction
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.launch_restriction import LaunchRestriction
from mirage_hf.verify.field_proof import prove
from tests.helpers import programs


def small(rows=4, k=64, n=48):
    return programs.rms_norm_linear(mi, rows=rows, k=k, n=n)


def options(config=None, **given):
    return superoptimizer_options.search_options(config=config, backend="cpu", **given)


def found(graph, max_kernels=4, **maps):
    results, report = search(
        graph,
        SearchOptions(
            time_limit=20, threads=1, max_kernels=max_kernels, maps=MapRestriction.of(**maps)
        ),
    )
    assert results, report
    return [f.ugraph for f in results]


def maps(u):
    """Return the maps of every kernel, as dims that are cut.

    These are imaps and fmaps of inputs, and omaps of outputs.
    """
    of = [maps_of(op.block) for op in u.block_ops]
    return (
        [{d for _, d in m.grid if d is not None} for k in of for m in k.inputs],
        [next((d for _, d in m.loop), None) for k in of for m in k.inputs],
        [{d for _, d in m.grid if d is not None} for k in of for m in k.outputs],
    )


# -- maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "imaps",
    [[{"x": None}, {"x": 1}], [(-1, -1, -1), (1, -1, -1)], [(None,), {"z": 1, "y": -1}]],
    ids=str,
)
def test_imaps_keep_the_rows_whole(imaps):
    """Our grid dims have no names.

    An axis that may not be cut is held whole, and the kernel is the same.
    """
    us = found(small(), imaps=imaps)
    assert all(cut <= {1} for u in us for cut in maps(u)[0])
    block = us[0].block_ops[0].block
    assert [a.role for a in block.axes if a.size == 4] == [Role.TILE] and isinstance(
        prove(us[0]), mi.Accepted
    )


def test_grid_dims_may_be_called_as_they_like_but_alike_in_all_maps():
    g = programs.gated_mlp(mi, rows=4, k=64, n=48)
    assert maps(found(g, imaps=[(0,), (-1, 1)])[0])[0] == [{0}, {1}, {1}]  # rows by x, columns by y
    assert maps(found(g, imaps=[(1,), (None, None, 0)])[0])[0] == [{0}, {1}, {1}]


def test_rows_and_columns_cannot_both_be_cut_by_x():
    g = small()
    with pytest.raises(
        errors.SearchError,
        match=r"no kernel that was found keeps to imaps=\[\{x→0\}, \{x→1\}\]: "
        r"the best has t0 imap .*allow those maps",
    ):
        found(g, imaps=[(0,), (1,)])


def test_fmaps_choose_the_loop():
    g = programs.attention(mi, heads=4, keys=256, d=64)
    for fmaps in ([None], [-1, 1, 2], [0, 1, 2, None]):
        us = found(g, fmaps=fmaps)
        allowed = {None if d == -1 else d for d in fmaps}
        assert all(set(maps(u)[1]) <= allowed for u in us)
    assert any(set(maps(u)[1]) == {None, 1, 2} for u in found(g, fmaps=[-1, 1, 2]))
    assert all(
        op.block.named(Role.LOOP) == () for u in found(g, fmaps=[None]) for op in u.block_ops
    )


def test_omaps():
    g = small()
    assert all(maps(u)[2] == [{1}] for u in found(g, max_kernels=1, omaps=[{"x": 1}]))
    assert {0, 1} in maps(found(g, omaps=[(1, 0)])[0])[2]


def test_a_restriction_costs_no_result_that_keeps_to_it():
    """If the maps of a result are allowed, the restricted search finds this result too."""
    for name in ("attention_decode", "lora_paper", "norm_gated_mlp"):
        g = programs.build(mi, name)
        for f in search(g, SearchOptions(time_limit=20, threads=1))[0][:4]:
            imaps, omaps, fmaps = [], [], []
            for op in f.ugraph.block_ops:
                of, place = (
                    maps_of(op.block),
                    {a.name: "xyz"[n] for n, a in enumerate(op.block.named(Role.GRID))},
                )
                imaps += [{place[a]: d for a, d in m.grid} for m in of.inputs]
                omaps += [{place[a]: d for a, d in m.grid} for m in of.outputs]
                fmaps += [next((d for _, d in m.loop), None) for m in of.inputs]
            assert str(f.ugraph) in {
                str(u) for u in found(g, imaps=imaps, omaps=omaps, fmaps=fmaps)
            }


def test_plans_that_have_no_block_graph_are_left_out():
    """With a loop other than the cheapest, a plan may have no block graph.

    It would store an exponential along its loop that only a shift in another kernel cancels.
    """
    g = programs.build(mi, "mla_decode", small=False)
    assert search(
        g, SearchOptions(time_limit=20, threads=1, max_candidates=256, roles=(("k", Role.TILE),))
    )[0]


def test_maps_reach_the_search_and_its_identity():
    g = small()
    result = mi.superoptimize(g, backend="cpu", imaps=[{"x": None}, {"x": 1}])
    assert result[0].num_kernels == 1 and all(cut <= {1} for cut in maps(result[0])[0])
    other = mi.superoptimize(g, backend="cpu", imaps=[{"x": None}, {"x": 0}])
    assert {0} in maps(other[0])[0]
    assert {0, 1} in maps(mi.superoptimize(g, backend="cpu")[0])[2]


def test_a_program_that_no_kernel_computes_keeps_the_library_path():
    g = mi.new_kernel_graph()
    g.cast(g.new_input((4, 8)), "int32")
    assert not mi.superoptimize(g, backend="cpu", imaps=[(0,)])[0].is_fused


@pytest.mark.parametrize(
    "given, says",
    [
        (
            dict(imaps=[(7, -1, -1)]),
            r"imaps: dim 7 is one that no tensor has; the program's inputs are t0 \(4, 64\)",
        ),
        (dict(omaps=[{"y": 5}]), "omaps: dim 5"),
        (dict(fmaps=[4]), "fmaps: dim 4"),
        (dict(fmaps=[0]), r"no kernel that was found keeps to fmaps=\[0\]"),
        (dict(imaps=[(0, 0)]), "sends two grid dims to one"),
        (dict(imaps=[{"w": 0}]), "grid dim 'w'; they are x, y and z"),
        (dict(imaps=[(0, 1, 2, 3)]), "is not a map; give a dict"),
        (dict(imaps=[()]), "is not a map"),
        (dict(imaps=["x"]), "is not a map"),
        (dict(imaps=[3]), "is not a map"),
        (dict(imaps={"x": 0}), "not a list of maps"),
        (dict(omaps=3), "not a list"),
        (dict(omaps="xy"), "not a list"),
        (dict(imaps=[]), "imaps: the list is empty"),
        (dict(fmaps=[]), "fmaps: the list is empty"),
        (dict(fmaps=2), "not a list"),
        (dict(fmaps=[True]), "fmaps: True is not a tensor dim"),
        (dict(fmaps=[-2]), "-2 is not a tensor dim; use 0, 1"),
        (dict(fmaps=["k"]), "'k' is not a tensor dim"),
        (dict(omaps=[{"x": 1.0}]), "1.0 is not a tensor dim"),
        (dict(fmaps=[-1.0]), "not a tensor dim"),
    ],
    ids=str,
)
def test_impossible_maps_say_why(given, says):
    with pytest.raises(errors.SearchError, match=says):
        mi.superoptimize(small(), backend="cpu", **given)


# -- every other parameter ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, says",
    [
        (dict(max_kernels=1.5), "max_kernels must be positive, an integer"),
        (dict(max_kernels=-1), "max_kernels"),
        (dict(max_kernels="2"), "max_kernels"),
        (dict(max_block_ops=2.0), "max_block_ops must be positive, an integer"),
        (dict(max_block_ops=False), "max_block_ops"),
        (dict(time_limit=math.inf), "time_limit must be positive, a number of seconds below"),
        (dict(time_limit=math.nan), "time_limit"),
        (dict(time_limit=-3), "time_limit"),
        (dict(seed=1.5), "seed must be an integer, it is 1.5"),
        (dict(seed=True), "seed"),
        (dict(seed=None), "seed"),
        (dict(verbose=1), "verbose must be True or False"),
        (dict(cache="no"), "cache must be True or False"),
        (dict(checkpoint=3), "checkpoint must be a path"),
        (dict(checkpoint=""), "checkpoint"),
        (dict(save_codes=7), "save_codes must be True, False or a folder"),
        (dict(progress=3), "progress must be a function"),
        (dict(config=3), "unknown config 3"),
        (dict(backend=None), "unknown backend None"),
        (dict(griddims=4), "griddims: 4 is not a list"),
        (dict(griddims=[]), "an empty list allows nothing"),
        (dict(griddims=[(True, 1)]), "griddims: .* is not one to 3"),
        (dict(griddims=[(2.0, 1)]), "griddims"),
        (dict(blockdims="128"), "blockdims: '128' is not a list"),
        (dict(blockdims=[(2048,)]), "power of two from 32 to 1024"),
        (dict(franges=8), "franges: 8 is not a list"),
        (dict(franges=["8"]), "franges"),
        (dict(franges=[True]), "franges"),
    ],
    ids=str,
)
def test_impossible_parameters_say_why(given, says):
    with pytest.raises(errors.SearchError, match=says):
        mi.superoptimize(small(), **{"backend": "cpu", **given})


def test_max_kernels_bounds_the_search_itself():
    assert [options(max_kernels=n)[0].max_kernels for n in (None, 1, 3, 4, 9)] == [4, 1, 3, 4, 4]
    assert (
        options("mlp", max_kernels=4)[0].max_kernels == 2
        and options("attention", max_kernels=1)[0].max_kernels == 1
    )
    g = programs.build(mi, "attention_decode")
    all_of, few = (
        search(g, SearchOptions(time_limit=20, threads=1, max_kernels=n))[1].counters
        for n in (4, 1)
    )
    assert few.plans < all_of.plans


BEST = {
    "attention": ("gqa_paper", "attention_decode", "qk_norm_attention", "mla_decode"),
    "lora": ("lora_paper", "lora_4096"),
    "mlp": ("gated_mlp", "norm_gated_mlp", "rms_norm_linear"),
}


@pytest.mark.parametrize("config, name", [(c, n) for c, names in BEST.items() for n in names])
def test_a_preset_saves_work_and_keeps_the_best(config, name):
    g = programs.build(mi, name)
    (every, all_of), (few, less) = (
        search(g, SearchOptions(**{**options(c)[0].__dict__, "threads": 1, "time_limit": 30}))
        for c in (None, config)
    )
    assert few[0].cost_us <= every[0].cost_us * 1.001 and less.stop == "exhausted"
    assert (
        less.counters.plans + less.counters.examined
        < all_of.counters.plans + all_of.counters.examined
    )


def test_schedules_are_restricted_in_every_kernel_of_a_ugraph():
    """A µGraph of two kernels stays only if both can have the number of blocks."""
    g = programs.build(mi, "gated_mlp", small=False)
    two = next(
        f.ugraph
        for f in search(g, SearchOptions(time_limit=20, threads=1))[0]
        if len(f.ugraph.block_ops) == 2
    )
    sizes = [[a.size for a in op.block.named(Role.GRID)] for op in two.block_ops]
    assert all(4096 in grid for grid in sizes)
    (kept,) = LaunchRestriction.of([(256,)], None, None).scheduled([two])
    assert len(kept.schedules) == 2
    for op, s in zip(kept.block_ops, kept.schedules, strict=True):
        assert math.prod(-(-a.size // s.tiles[a.name]) for a in op.block.named(Role.GRID)) == 256
    with pytest.raises(errors.SearchError, match="no kernel keeps to griddims"):
        LaunchRestriction.of([(3,)], None, None).scheduled([two])
