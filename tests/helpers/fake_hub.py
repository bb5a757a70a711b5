"""A Hub of models in a folder, with the calls of huggingface_hub that zoos use."""

from __future__ import annotations

import hashlib
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class FakeHub:
    """Repos below `root`/repos, and a cache as the Hub's client keeps it: links to blobs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []

    def repo(self, name: str) -> Path:
        return self.root / "repos" / name

    def install(self, monkeypatch: Any) -> None:
        """Take the place of the Hub's client."""
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: self)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)

    def snapshot_download(self, name: str, revision: str | None = None, *, allow_patterns: Any):
        self.calls.append("download")
        if not self.repo(name).is_dir():
            raise OSError(f"404: no repo {name}")
        cache = self.root / "cache" / name.replace("/", "--")
        snapshot = cache / "snapshots" / (revision or "main")
        shutil.rmtree(cache, ignore_errors=True)
        (cache / "blobs").mkdir(parents=True)
        for path in self.files(name):
            relative = path.relative_to(self.repo(name))
            if not any(fnmatch(str(relative), p) for p in allow_patterns):
                continue
            blob = cache / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copyfile(path, blob)
            (snapshot / relative).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / relative).symlink_to(blob)
        return str(snapshot)

    def files(self, name: str) -> list[Path]:
        return sorted(p for p in self.repo(name).rglob("*") if p.is_file())

    def repo_exists(self, name: str) -> bool:
        return self.repo(name).is_dir()

    def model_info(self, name: str, *, revision: str | None, files_metadata: bool):
        assert files_metadata
        siblings = [
            SimpleNamespace(rfilename=str(p.relative_to(self.repo(name))), size=p.stat().st_size)
            for p in self.files(name)
        ]
        return SimpleNamespace(siblings=siblings)

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self.repo(name).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, allow_patterns: Any
    ) -> None:
        self.calls.append("upload")
        for path in Path(folder_path).rglob("*"):
            relative = path.relative_to(folder_path)
            if path.is_file() and any(fnmatch(str(relative), p) for p in allow_patterns):
                (self.repo(repo_id) / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, self.repo(repo_id) / relative)
