"""Every mutation of `make mutations` still has the one place that it breaks."""

from tests.kit.mutations import MUTATIONS, ROOT


def test_each_is_for_one_place_of_the_product_and_one_folder_of_tests() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
    for mutation in MUTATIONS:
        assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old
        assert all((ROOT / folder).is_dir() for folder in mutation.tests.split()), mutation.name
