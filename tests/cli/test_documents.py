"""Commands and links that the documents show."""

import re

import pytest

from tracekit.cli import main


def commands(repository):
    found = []
    for name in ("README.md", "docs/quickstart.md"):
        text = (repository / name).read_text()
        found += re.findall(r"(?:^|`)(tracekit train(?![a-z])[^`#\n]*)", text, re.M)
    return sorted({command.strip() for command in found})


def test_every_train_command_in_the_documents_is_accepted(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(repository / "configs")
    (tmp_path / "mine.toml").write_text("seed = 2\n")
    shown = commands(repository)
    assert len(shown) >= 6
    for command in shown:
        words = [word for word in command.split()[1:] if word != "--dry-run"]
        assert main([*words, "--dry-run"]) == 0, (command, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(repository, name):
    text = (repository / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not ((repository / name).parent / link).exists()]
    assert missing == []


def test_the_readme_shows_both_commands_on_its_first_screen(repository):
    first = "\n".join((repository / "README.md").read_text().splitlines()[:24])
    makefile = (repository / "Makefile").read_text()
    for target in ("quickstart", "test"):
        assert f"make {target}" in first and re.search(rf"^{target}:", makefile, re.M)
    assert "pip install ." in first and "tracekit train" in first
