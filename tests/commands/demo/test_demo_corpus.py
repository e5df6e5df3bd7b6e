"""The corpus is the same on every rank, and nothing that is validated with was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pacecar.commands.demo.byte_gpt import GPT, GPTConfig
from pacecar.commands.demo.training_text import CORPUS_BYTES_MAX, TextWindows, load_corpus, source_files


def library(root: Path, files: int = 64) -> Path:
    for i in range(files):
        path = root / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# file {i:04d}\n" * 20)
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("# not the library\n")
    return root


@pytest.mark.slow
def test_the_standard_library_is_there_and_is_text() -> None:
    corpus = load_corpus()
    assert 1_000_000 < len(corpus.train) + len(corpus.validation) <= CORPUS_BYTES_MAX
    assert len(corpus.train) > 5 * len(corpus.validation) > 0
    assert b"import " in bytes(corpus.train[:100_000].tolist())


def test_files_are_wholly_in_one_part_and_packages_left_out(tmp_path: Path) -> None:
    corpus = load_corpus(library(tmp_path))
    train, validation = (bytes(part.tolist()) for part in (corpus.train, corpus.validation))
    assert corpus.files == 64
    for i in range(64):
        line = f"# file {i:04d}".encode()
        assert (line in train) != (line in validation)
    assert b"not the library" not in train + validation


def test_the_order_does_not_depend_on_the_disk(tmp_path: Path) -> None:
    root = library(tmp_path)
    names = [path.name for path in source_files(root)]
    for path in list(root.rglob("*.py")):
        text = path.read_text()
        path.unlink()
        path.write_text(text)
    assert [path.name for path in source_files(root)] == names
    assert torch.equal(load_corpus(root).train, load_corpus(root).train)


def test_the_size_is_capped(tmp_path: Path) -> None:
    corpus = load_corpus(library(tmp_path), bytes_max=10_000)
    assert 0 < len(corpus.train) + len(corpus.validation) <= 10_000


def test_too_little_text_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 readable Python sources"):
        load_corpus(tmp_path)


def test_windows_are_disjoint_but_for_the_byte_that_is_target_and_next_input() -> None:
    windows = TextWindows(torch.arange(100, dtype=torch.uint8), context=10)
    assert len(windows) == 9
    assert windows[0].tolist() == list(range(11))
    assert windows[8].tolist() == list(range(80, 91))
    assert windows.batch([0, 3]).shape == (2, 11)


def test_the_model_sees_no_byte_of_the_future() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=8, width=12, layers=2, heads=3))
    text = torch.randint(0, 256, (1, 8))
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_the_default_model_is_small_and_without_what_forbids_exact_tuning() -> None:
    model = GPT(GPTConfig())
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert not any(isinstance(m, torch.nn.Dropout | torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
