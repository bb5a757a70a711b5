"""The command line: its output, exit codes and errors."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.cli import live, models
from mirage_hf.cli.main import app
from mirage_hf.errors import Rejected
from mirage_hf.pipeline import find_outcome, superoptimizer
from mirage_hf.verify.verdict import Accepted
from tests.helpers import programs


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MIRAGE_HF_THREADS", "2")  # undo what --threads sets
    superoptimizer._memory.clear()


def run(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def capture(capsys, monkeypatch):
    """Return what a command prints, also to rich's consoles.

    Consoles keep the streams that they were made with.
    """
    from rich.console import Console

    from mirage_hf.cli import show

    monkeypatch.setattr(
        show, "console", Console(width=140, highlight=False, soft_wrap=True, force_terminal=False)
    )
    monkeypatch.setattr(
        show, "errors_console", Console(stderr=True, highlight=False, soft_wrap=True)
    )

    def command(*args: object, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as stop:
            app([str(a) for a in args])
        seen = capsys.readouterr()
        assert stop.value.code == code, seen.out + seen.err
        return seen.out, seen.err

    return command


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.json"
    programs.rms_norm_linear(mi, rows=2, k=64, n=48).to_json(path)
    return path


def test_help_names_every_command():
    for command in ("demo", "optimize", "bench", "search", "zoo", "env"):
        assert command in run("--help").output
        run(command, "--help")


def test_env_shows_versions_and_the_settings_in_force(capture, tmp_path):
    out, _ = capture("env")
    assert "torch" in out and str(tmp_path / "cache") in out and mi.__version__ in out


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("MIRAGE_HF_THREADS", "many", "must be an integer, it is 'many'; unset it for"),
        ("MIRAGE_HF_THREADS", "0", "must be positive"),
        ("MIRAGE_HF_THREADS", "1.5", "must be an integer"),
        ("MIRAGE_HF_SEARCH_SECONDS", "soon", "must be a number"),
        ("MIRAGE_HF_SEARCH_SECONDS", "nan", "must be positive and finite"),
        ("MIRAGE_HF_SEARCH_SECONDS", "inf", "unset it for 60"),
        ("MIRAGE_HF_CACHE", "~no_such_user/kernels", "a home folder that is not known"),
    ],
)
def test_a_wrong_environment_variable_is_an_error_without_a_traceback(
    capture, monkeypatch, name, value, says
):
    monkeypatch.setenv(name, value)
    _, err = capture("env", code=1)
    assert (
        err.startswith(f"error: environment variable {name} ")
        and says in err
        and err.count("\n") == 1
    )


def test_search_writes_results_that_can_be_loaded(capture, program, tmp_path):
    found, kernel = tmp_path / "found.json", tmp_path / "kernel.py"
    out, _ = capture(
        "search", program, "--time-limit", 20, "--threads", 1, "--json", found, "--triton", kernel
    )
    assert "exhausted" in out and "kernel.py" in out
    data = json.loads(found.read_text())
    best = tmp_path / "best.json"
    best.write_text(json.dumps(data["results"][0]))
    assert mi.load_ugraph(best).num_kernels == 1
    assert data["report"]["error_bound"] < 1e-9
    compile(kernel.read_text(), "kernel.py", "exec")


def test_search_writes_a_page(capture, program, tmp_path):
    page, kernel = tmp_path / "report.html", tmp_path / "kernel.py"
    out, err = capture("search", program, "--html", page, "--triton", kernel, "--time-limit", 20)
    text = page.read_text(encoding="utf-8")
    assert (
        f"written: {page}" in out
        and text.startswith("<!DOCTYPE html>")
        and "<svg" in text
        and "@triton.jit" in text
    )
    assert err.startswith("program.json: searching, 20 s at most")


def test_search_has_the_options_of_superoptimize(capture, program, monkeypatch, tmp_path):
    given = {}

    def record(graph, **options):
        given.update(options)
        raise errors.SearchError("seen")

    monkeypatch.setattr(mi, "superoptimize", record)
    point = tmp_path / "c.json"
    _, err = capture(
        "search",
        program,
        "--config",
        "lora",
        "--backend",
        "cpu",
        "--time-limit",
        3,
        "--max-kernels",
        2,
        "--max-block-ops",
        9,
        "--griddims",
        "64",
        "--griddims",
        "32x2",
        "--blockdims",
        "64,2",
        "--franges",
        4,
        "--franges",
        8,
        "--seed",
        5,
        "--no-cache",
        "--checkpoint",
        point,
        code=1,
    )
    assert err.endswith("error: seen\n")
    del given["progress"]
    assert given == dict(
        config="lora",
        backend="cpu",
        time_limit=3.0,
        max_kernels=2,
        max_block_ops=9,
        griddims=[(64,), (32, 2)],
        blockdims=[(64, 2)],
        franges=[4, 8],
        clusters=False,
        seed=5,
        cache=False,
        checkpoint=point,
    )
    left_out = {"graph", "imaps", "omaps", "fmaps", "verbose", "save_codes"}
    assert set(inspect.signature(superoptimizer.superoptimize).parameters) - left_out == {
        *given,
        "progress",
    }


def test_the_second_search_is_loaded(capture, program):
    out, _ = capture("search", program, "--time-limit", 20)
    assert "stopped: exhausted" in out
    superoptimizer._memory.clear()
    out, _ = capture("search", program, "--time-limit", 20)
    assert "stopped: loaded" in out and "that search stopped: exhausted" in out
    out, _ = capture("search", program, "--time-limit", 20, "--no-cache")
    assert "stopped: exhausted" in out


@pytest.mark.parametrize(
    "options, says",
    [
        (["--config", "atention"], "did you mean attention"),
        (["--griddims", "x"], "--griddims x: give numbers"),
        (["--griddims", "0"], "positive"),
        (["--blockdims", "100"], "power of two"),
        (["--time-limit", "0"], "time_limit must be positive"),
        (["--max-kernels", "0"], "max_kernels"),
        (["--backend", "cuda"], "there is no GPU; search with backend='cpu'"),
        (["--seed", "a"], "--seed"),
        (["--threads", "0"], "--threads"),
        (["--nope"], "--nope"),
        (["--html", "nowhere/r.html"], "has no folder"),
        (["--json", "."], "is a folder"),
    ],
    ids=str,
)
def test_misuse_prints_one_line_and_exits_with_2(capture, program, options, says, monkeypatch):
    monkeypatch.setattr(mi, "superoptimize", None)  # nothing is searched
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out, err = capture("search", program, *options, code=2)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert "search --help)" in err


def test_where_a_report_cannot_be_written_nothing_is_loaded(capture, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    for path, says in ((tmp_path, "is a folder"), (tmp_path / "none" / "r.json", "has no folder")):
        _, err = capture("optimize", "a/model", "--report-json", path, code=2)
        assert err.startswith("error: --report-json ") and says in err and "optimize --help)" in err


@pytest.mark.parametrize("option", ["--json", "--html", "--triton", "--checkpoint"])
def test_a_program_is_not_overwritten_with_its_results(option, tmp_path, capture):
    program, link = tmp_path / "g.json", tmp_path / "link.json"
    written = programs.rms_norm_linear(mi, 2, 32, 16).to_json(program)
    link.symlink_to(program)
    for path in (program, link, tmp_path / "." / "g.json"):
        _, err = capture("search", program, option, path, "--no-cache", code=2)
        assert f"{option} {path}: is PROGRAM, which would be overwritten; give another file" in err
    assert program.read_text() == written


def test_two_options_do_not_write_one_file(tmp_path, capture):
    programs.rms_norm_linear(mi, 2, 32, 16).to_json(tmp_path / "g.json")
    _, err = capture(
        "search",
        tmp_path / "g.json",
        "--json",
        tmp_path / "out",
        "--html",
        tmp_path / "out",
        code=2,
    )
    assert (
        f"--html {tmp_path / 'out'}: is --json, which would be overwritten" in err
        and not (tmp_path / "out").exists()
    )


def test_a_model_is_not_overwritten_with_its_report(tmp_path, capture):
    (tmp_path / "config.json").write_text("{}")
    _, err = capture("optimize", tmp_path, "--report-json", tmp_path / "config.json", code=2)
    assert (
        "is the model's config.json, which would be overwritten" in err
        and (tmp_path / "config.json").read_text() == "{}"
    )


def test_wrong_options_of_optimize_are_reported_before_anything_is_loaded(capture, monkeypatch):
    monkeypatch.setattr(models, "load", None)
    for option, value, says in (
        ("--batch-size", 0, "batch sizes are positive integers"),
        ("--backend", "tritn", "did you mean triton"),
        ("--tune", "ful", "did you mean full"),
    ):
        _, err = capture("optimize", "a/model", option, value, code=2)
        assert err.startswith("error: ") and says in err, err


def test_other_misuse(capture):
    for arguments in (["serach"], ["search"], ["--nope"], ["zoo", "lst"]):
        _, err = capture(*arguments, code=2)
        assert err.startswith("error: ") and err.count("\n") == 1, err


def test_an_option_that_is_impossible_for_the_program_fails(capture, program):
    _, err = capture("search", program, "--griddims", "7", code=1)
    assert "allow other numbers" in err and "Traceback" not in err


def test_an_interrupted_search_shows_what_it_found(capture, program, monkeypatch):
    real = find_outcome.search_and_verify

    def interrupted(*args, **options):
        searched = real(*args, **options)
        return replace(searched, report=replace(searched.report, stop="interrupted"))

    monkeypatch.setattr(find_outcome, "search_and_verify", interrupted)
    out, _ = capture("search", program)
    assert (
        out.startswith("interrupted: these are the results until then")
        and "The best µGraph" in out
        and "customized" in out
    )


@dataclass
class Renamed:
    """Counters of a search whose version has other counters."""

    values: int = 12345
    schedules_cut: int = 6
    seconds: float = 0.5


def test_progress_on_a_terminal_and_elsewhere(monkeypatch):
    import io

    from rich.console import Console

    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
        view = live.SearchView("p.json", 30, console)
        monkeypatch.setattr(live, "EVERY", 0.0)
        for stage, detail in (
            ("search", Renamed()),
            ("verify", Accepted()),
            ("verify", Accepted()),
            ("verify", Rejected("rounds [badly]")),
            ("tune", (3, 7, "measuring")),
            ("search", None),
        ):
            view(stage, detail)
        if terminal:
            console.print(view)
        text = console.file.getvalue()
        for part in (
            "of 30 s",
            "values kept",
            "12,345",
            "schedules cut",
            "candidates verified",
            "rejected",
            "[badly]",
            "3 of 7, measuring",
        ):
            assert part in text, part
        assert ("\n" in text) and (terminal or text.startswith("p.json: searching, 30 s at most"))


def test_progress_without_a_terminal_prints_few_lines(monkeypatch):
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=False)
    view = live.SearchView("p.json", None, console)
    for _ in range(100):
        view("search", Renamed())
    assert console.file.getvalue().count("\n") == 1


def test_a_file_that_is_no_program_is_an_error_without_a_traceback(capture, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    _, err = capture("search", bad, code=1)
    assert err.startswith("error: ") and "bad.json" in err and "Traceback" not in err
    for no_file, says in (
        (tmp_path / "missing.json", "does not exist"),
        (tmp_path, "is a directory"),
    ):
        _, err = capture("search", no_file, code=2)
        assert (
            err.startswith("error: Invalid value for 'program': ")
            and str(no_file) in err
            and says in err
            and "search --help" in err
        )


def test_the_demo_needs_its_model(capture, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "DEMO_MODEL", tmp_path / "none")
    _, err = capture("demo", code=1)
    assert "its small model is missing" in err and "--model" in err
    _, err = capture("demo", "--model", models.DEMO_MODEL, "--dtype", "int32", code=1)
    assert "--dtype int32: models are run in float16, bfloat16 or float32" in err


def test_a_command_does_not_tune_in_the_background(capture):
    _, err = capture("optimize", models.DEMO_MODEL, "--tune", "background", code=2)
    assert "use --tune auto" in err


@pytest.mark.parametrize(
    "options, says",
    [
        (["--device", "tpu"], "--device tpu: kernels run on NVIDIA GPUs and on the CPU; use"),
        (["--device", "cuda:x"], "use cuda, cuda:1 or cpu"),
        (["--device", "mps"], "use cuda, cuda:1 or cpu"),
        (["--device", "cuda:99"], "--device cuda:99: torch sees"),
        (["--dtype", "int8"], "--dtype int8: models are run in float16, bfloat16 or float32"),
    ],
    ids=str,
)
def test_a_wrong_device_or_dtype_is_an_error_without_a_traceback(capture, options, says):
    for command in ("optimize", "bench"):
        _, err = capture(command, models.DEMO_MODEL, *options, code=1)
        assert err.startswith("error: ") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("folder", ["./none", "/none", "~/none", "a/b/none"])
def test_a_path_that_can_only_be_a_folder_is_not_looked_for_on_the_hub(
    capture, monkeypatch, tmp_path, folder
):
    import transformers as tf

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", None)
    for command in (("optimize", folder), ("bench", folder), ("demo", "--model", folder)):
        _, err = capture(*command, code=1)
        assert (
            err == f"error: {folder}: there is no such folder; "
            "give a model's folder or a Hub id (owner/name)\n"
        )


def test_a_model_without_a_tokenizer_is_optimized_and_has_no_text(capture, tmp_path):
    import transformers as tf

    sizes = dict(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    out, _ = capture("optimize", tmp_path, "--dry-run")
    assert "planned" in out
    _, err = capture("bench", tmp_path, code=1)
    assert (
        err.startswith(f"error: {tmp_path}: has no tokenizer that can be loaded (")
        and " …); put one" in err
    )
    assert "save_pretrained(FOLDER)" in err
    (tmp_path / "config.json").unlink()
    _, err = capture("optimize", tmp_path, code=1)
    assert "cannot be loaded as a causal language model" in err


@pytest.mark.parametrize(
    "command",
    [("bench", models.DEMO_MODEL), pytest.param(("demo",), marks=pytest.mark.thorough)],
)
def test_a_prompt_without_tokens_is_an_error_without_a_traceback(capture, monkeypatch, command):
    load = models.load

    def without_tokens(*args, **kwargs):
        loaded = load(*args, **kwargs)
        loaded.inputs.update(input_ids=loaded.inputs["input_ids"][:, :0])
        return loaded

    monkeypatch.setattr(
        models, "load", without_tokens
    )  # however this tokenizer encodes an empty text
    _, err = capture(*command, "--prompt", "", code=1)
    assert (
        err.startswith("error: the tokenizer makes no tokens of the prompt ''")
        and err.count("\n") == 1
    )


def test_a_model_without_blocks_is_an_error_without_a_traceback(capture, tmp_path, monkeypatch):
    import transformers as tf

    config = tf.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
    )
    model = tf.BertModel(config).eval()
    monkeypatch.setattr(models, "load", lambda *_, **__: models.Loaded(model, None, {}, ""))
    with pytest.warns(errors.OptimizeWarning, match="nothing in this BertModel was replaced"):
        _, err = capture("optimize", "bert", code=1)
    assert err.startswith("error: nothing in this model was replaced") and "Traceback" not in err


def test_explain_says_what_a_step_runs(capture, tmp_path):
    import transformers as tf

    config = tf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    out, _ = capture("explain", tmp_path)
    assert "c_attn" in out and "layer_norm, matmul, add" in out and "2 and 2 heads of 16" in out
    assert "embedding" in out and "100% of" in out
    _, err = capture("explain", tmp_path / "none", code=1)
    assert "cannot be built from its config" in err


def test_zoo_lists_and_verifies(capture, tmp_path):
    from mirage_hf.codegen.triton import generate
    from mirage_hf.zoo.store import Store
    from tests.zoo.test_zoo import entry

    zoo = Store(tmp_path / "zoo", writable=True)
    kernel = generate(entry().ugraph, entry().schedules).source
    folder = zoo.put(entry(kernel=kernel))
    assert isinstance(folder, Path)
    out, _ = capture("zoo", "list", zoo.root)
    assert "rms_norm_linear" in out and "9.50" in out and "1 entries" in out
    out, _ = capture("zoo", "verify", zoo.root)
    assert "1 entries are valid" in out
    for wrong in (folder, folder.parent, folder.parents[1], zoo.root.parent):
        for command in ("list", "verify"):
            _, err = capture("zoo", command, wrong, code=1)
            assert f"name the zoo itself, {zoo.root}" in err
    (tmp_path / "empty").mkdir()
    _, err = capture("zoo", "verify", tmp_path / "empty", code=1)
    assert "holds no entry of a kernel zoo" in err
    zoo.put(entry(kernel=kernel + "# edited"))
    out, _ = capture("zoo", "verify", zoo.root, code=1)
    assert "kernel.py is not what is generated here" in out
    (folder / "kernel.py").write_text("import os")
    out, _ = capture("zoo", "verify", zoo.root, code=1)
    assert "kernel.py: is not the file" in out
    out, _ = capture("zoo", "list", zoo.root)
    assert "0 entries, and 1 that `mirage-hf zoo verify` rejects" in " ".join(out.split())
    _, err = capture("zoo", "list", tmp_path / "nowhere", code=1)
    assert "neither a folder nor a Hub repo" in err


def test_the_demo_runs_and_the_second_optimize_searches_nothing(capture, tmp_path):
    out, _ = capture("demo", "--tokens", 12, "--device", "cpu")
    for part in (
        "Blocks found",
        "rms_norm_linear",
        "gated_mlp",
        "exhausted",
        "The same 12 greedy tokens",
        "the cpu backend is for checking",
        "What a GPU would run",
        "torch launches",
        "exactly what they were",
    ):
        assert part in out
    report = tmp_path / "report.json"
    out, _ = capture("optimize", models.DEMO_MODEL, "--report-json", report, "--device", "cpu")
    assert {row["source"] for row in json.loads(report.read_text())["rows"]} == {"cache"}
    out, _ = capture("bench", models.DEMO_MODEL, "--tokens", 4, "--rounds", 1, "--device", "cpu")
    assert re.search(r"times (as fast|slower: the cpu backend is for checking)", out)


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 16},
            "quantized by awq: 4 bits in groups of 16; MB are those of codes",
        ),
        ({"quant_method": "quanto"}, "quantized by quanto: its config is not read"),
    ],
)
def test_explain_says_how_a_checkpoint_is_quantized(capture, tmp_path, settings, said):
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        quantization_config=settings,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    out, _ = capture("explain", tmp_path)
    assert said in " ".join(out.split())
