"""What people copy: the sample configurations of the README and deploy/ are accepted, and the documents' links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from tests.tiny_tokenizer import model

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
WITH_SAMPLES = ("README.md", "docs/redis.md")


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*.yaml")), ids=lambda path: path.name)
def test_sample_configurations_are_accepted(path: Path) -> None:
    result = CliRunner().invoke(main, ["check-config", str(path)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_sample_configurations_in_documents_are_accepted(name: str, tmp_path: Path) -> None:
    samples = re.findall(r"```yaml\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)
    assert samples
    for number, sample in enumerate(samples):
        file = tmp_path / f"{number}.yaml"
        # a model directory of somebody else is looked for while it is checked
        text = re.sub(r"(?<=tokenizer: )\S+", str(model("qwen")), sample)
        file.write_text(re.sub(r"(?<=_file: )\S+", str(ROOT / "README.md"), text))  # and so are certificates
        result = CliRunner().invoke(main, ["check-config", str(file)])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_to_files_lead_somewhere(name: str) -> None:
    document = ROOT / name
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", document.read_text("utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_make_target_that_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = "\n".join((ROOT / name).read_text("utf-8") for name in DOCUMENTS)
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert named and named <= targets
