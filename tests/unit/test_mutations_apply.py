"""`make mutations` takes safeguards away by their text; here it is seen that each is still found."""

from pathlib import Path

from tests.mutations.table import MUTATIONS

SOURCE = Path(__file__).parents[2] / "src" / "headstart"


def test_every_mutation_has_its_text_once() -> None:
    found = {mutation.name: (SOURCE / mutation.path).read_text().count(mutation.before) for mutation in MUTATIONS}
    assert set(found.values()) == {1}, found
