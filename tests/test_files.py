"""Files are read with limits and written atomically, whatever lies under their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mirage_hf as mi
from mirage_hf import files
from tests.helpers.ugraphs import rms_norm_linear

WRITERS = {
    "graph": lambda path: rms_norm_linear().program.to_json(path),
    "µGraph": lambda path: rms_norm_linear().to_json(path),
    "picture": lambda path: rms_norm_linear().visualize(path),
    "Triton": lambda path: rms_norm_linear().generate_triton_program(path),
    "CUDA": lambda path: rms_norm_linear().generate_cuda_program(path),
}

needs_fifos = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def test_a_link_stays_and_its_file_is_written(tmp_path, write):
    file, link = tmp_path / "file.svg", tmp_path / "link.svg"
    link.symlink_to(file)
    for _ in range(2):  # the file is missing, then there
        write(link)
        assert link.is_symlink() and not file.is_symlink() and file.stat().st_size > 100
    assert {p.name for p in tmp_path.iterdir()} == {"file.svg", "link.svg"}


def test_the_other_name_of_a_hard_link_keeps_its_content(tmp_path, write):
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    first.write_text("an input")
    os.link(first, second)
    write(second)
    assert first.read_text() == "an input" and second.stat().st_size > 100


@needs_fifos
def test_a_fifo_is_written_to(tmp_path, write):
    fifo = tmp_path / "fifo.svg"
    os.mkfifo(fifo)
    reader = subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE)
    handle = os.open(fifo, os.O_WRONLY)  # waits until the reader is there
    write(fifo)
    os.close(handle)
    got, _ = reader.communicate(timeout=30)
    assert fifo.is_fifo() and len(got) > 100


@needs_fifos
def test_a_fifo_without_a_reader_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="fifo"):
        files.write_text(tmp_path / "fifo", "text")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_is_written_to_and_stays():
    before = os.stat("/dev/null").st_rdev
    rms_norm_linear().to_json("/dev/null")
    assert os.stat("/dev/null").st_rdev == before
    with pytest.raises(OSError):
        rms_norm_linear().to_json("/dev/full")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "graph.json"
    path.write_text("old")

    def no_replace(*_: object) -> None:
        raise OSError(28, "No space left on device", "a temporary name")

    monkeypatch.setattr(files.os, "replace", no_replace)
    with pytest.raises(OSError, match=r"No space left.*graph\.json"):
        files.write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["graph.json"]


def test_permissions_stay(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text("old")
    path.chmod(0o640)
    files.write_text(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640


def test_a_write_that_is_killed_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    script = (
        "import os, signal, sys; from pathlib import Path; from mirage_hf import files\n"
        "files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"files.write_text(Path({str(path)!r}), 'new')"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode != 0
    assert path.read_text() == "old"


@needs_fifos
def test_only_regular_files_of_a_limited_size_are_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        files.read_bytes(path, 4)
    os.mkfifo(tmp_path / "fifo")
    for name in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            files.read_bytes(Path(name), 100)


def test_links_may_not_lead_out_of_a_folder(tmp_path):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "zoo" / "inside").write_text("y")
    for name, target in (("out", "../secret"), ("in", "inside"), ("circle", "circle")):
        (tmp_path / "zoo" / name).symlink_to(target)
    assert files.read_bytes(tmp_path / "zoo" / "in", 9, tmp_path / "zoo") == b"y"
    with pytest.raises(OSError, match="leads out of"):
        files.read_bytes(tmp_path / "zoo" / "out", 9, tmp_path / "zoo")
    with pytest.raises(OSError):
        files.read_bytes(tmp_path / "zoo" / "circle", 9, tmp_path / "zoo")


def test_a_path_is_inside_of_a_folder_if_its_links_are(tmp_path):
    zoo = tmp_path / "zoo"
    (zoo / "real").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "alias").symlink_to("zoo")
    for name, target in (("in", "real"), ("out", "../elsewhere"), ("circle", "circle")):
        (zoo / name).symlink_to(target)
    inside = [zoo, zoo / "real" / "x", zoo / "in" / "x", tmp_path / "alias" / "real"]
    outside = [tmp_path, zoo / "out" / "x", zoo / ".." / "elsewhere", zoo / "real" / ".." / ".."]
    assert [files._is_inside(path, zoo) for path in inside] == [True] * 4
    assert [files._is_inside(path, zoo) for path in outside] == [False] * 4
    assert files._is_inside(zoo / "real" / "x", tmp_path / "alias")


def test_an_endless_file_is_no_graph(monkeypatch):
    from mirage_hf.graph import json_reader

    monkeypatch.setattr(json_reader, "_MOST_BYTES", 1 << 16)
    with pytest.raises(mi.errors.FormatError, match="more than 65,536 bytes"):
        mi.load_graph("/dev/zero")
