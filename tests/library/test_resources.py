"""Shipped files are found by the name a user types, from a checkout and from an installed wheel."""

import sysconfig
from pathlib import Path

import pytest

from peftkit import resources
from peftkit.errors import DataError


def test_a_shipped_recipe_is_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = resources.shipped("recipes")
    assert found is not None and found.is_dir() and found.is_absolute()


def test_what_is_typed_wins_over_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = Path("recipes")
    own.mkdir()
    assert resources.find("recipes") == own


def test_a_name_that_is_nowhere_comes_back_as_typed():
    assert resources.find("no/such/file.yaml") == Path("no/such/file.yaml")
    assert resources.shipped("no/such/file.yaml") is None


@pytest.mark.parametrize("outside", ["/etc/hostname", "../main", "recipes/../../x"])
def test_nothing_outside_the_shipped_folders_counts_as_shipped(outside):
    assert resources.shipped(outside) is None


def test_outside_a_checkout_files_come_from_the_share_folder_of_the_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "site-packages" / "peftkit")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path) if name == "data" else "")
    recipe = tmp_path / "share" / "peftkit" / "recipes" / "only-here.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("base: x")
    assert resources.find("recipes/only-here.yaml") == recipe


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("name", ["sentiment", "address"])
def test_example_data_has_a_name_of_its_own(name, split):
    assert f"{name}/{split}.jsonl" in resources.examples()
    assert resources.find(f"example:{name}/{split}.jsonl").read_text(encoding="utf-8").startswith('{"prompt"')


def test_an_example_folder_can_be_named():
    assert resources.find("example:sentiment").is_dir()


def test_a_misspelt_example_names_the_nearest_one():
    with pytest.raises(DataError, match=r"example:sentimant/train.jsonl: .*did you mean 'sentiment/train.jsonl'"):
        resources.find("example:sentimant/train.jsonl")


def test_an_example_outside_the_examples_is_refused():
    with pytest.raises(DataError, match="no such example"):
        resources.find("example:../formats.py")
