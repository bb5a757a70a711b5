"""Fetch kernel zoos from the Hugging Face Hub, and upload them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.zoo.entry import ENTRY, KERNEL, MOST_BYTES, SEARCH, UGRAPH

#: The files of a zoo in a repo. Nothing else is fetched.
FILES = tuple(f"*/*/*/{name}" for name in (ENTRY, UGRAPH, SEARCH, KERNEL))

#: The most bytes of a zoo that is fetched.
_MOST_BYTES = 1 << 30

_MOST_OF_A_REASON = 200


@cache
def fetched(repo: str, revision: str | None = None) -> Path:
    """Return the folder of a repo's zoo in the Hub's cache. The Hub is asked once in a process.

    Raises:
        ZooError: The repo cannot be fetched, or its files are too large.
    """
    import huggingface_hub

    try:
        _check_sizes(huggingface_hub.HfApi(), repo, revision)
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(FILES))
        )
    except errors.ZooError:
        raise
    except Exception as e:  # the Hub's client raises its own, the HTTP library's and OSError
        raise errors.ZooError(
            f"zoo {repo!r} could not be fetched from the Hub ({_reason(e)}); "
            "check the name and the network, or give a local copy's folder"
        ) from e


def fetched_if_there(repo: str) -> Path | None:
    """Return the folder of a repo's zoo, or None if there is no such repo.

    Raises:
        ZooError: The repo is there and cannot be fetched.
    """
    import huggingface_hub

    try:
        if not huggingface_hub.HfApi().repo_exists(repo):
            return None
    except Exception as e:
        raise errors.ZooError(
            f"zoo {repo!r}: the Hub cannot be asked ({_reason(e)}); check the name and the network"
        ) from e
    return fetched(repo)


def _check_sizes(api: Any, repo: str, revision: str | None) -> None:
    """Check the sizes of a repo's files before they are fetched.

    Raises:
        ZooError: They are too large.
    """
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True)
    except Exception:  # without a network the Hub's cache may have the repo
        return
    files = [f for f in info.siblings or () if f.rfilename.count("/") == 3]
    sizes = {f.rfilename: f.size or 0 for f in files if f.rfilename.split("/")[3] in MOST_BYTES}
    for name, size in sizes.items():
        if size > MOST_BYTES[name.split("/")[3]]:
            raise errors.ZooError(
                f"zoo {repo!r}: {errors.printable(name)} has {size:,} bytes, which no entry has; "
                "the repo is no kernel zoo"
            )
    if sum(sizes.values()) > _MOST_BYTES:
        raise errors.ZooError(
            f"zoo {repo!r} has {sum(sizes.values()):,} bytes, the most is {_MOST_BYTES:,}; "
            "fetch the part that you need, and give its folder"
        )


def links_inside(root: Path) -> Path:
    """Return the folder that links of a fetched zoo may lead to.

    In the Hub's cache the files of <repo>/snapshots/<revision> are links to <repo>/blobs.
    """
    return root.parents[1] if root.parent.name == "snapshots" else root


def upload(repo: str, folder: Path, message: str, private: bool = False) -> str:
    """Upload a folder's zoo to a repo, which is made if it is missing. Return its address.

    Raises:
        ZooError: The repo cannot be written.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, allow_patterns=list(FILES)
        )
    except Exception as e:  # the Hub's client raises its own, the HTTP library's and OSError
        raise errors.ZooError(
            f"zoo {repo!r} could not be uploaded to the Hub ({_reason(e)}); "
            "check the name, the network, and your token (hf auth login)"
        ) from e
    fetched.cache_clear()
    return f"https://huggingface.co/{repo}"


def _reason(error: Exception) -> str:
    return errors.printable(errors.described(error)[:_MOST_OF_A_REASON])
