"""The table of families in docs/models.md."""

import pytest
from tools.model_table import PAGE, Family, _lines, with_table


@pytest.mark.usefixtures("native_library")
def test_the_page_has_the_table_of_today() -> None:
    """`python -m tools.model_table` writes it."""
    page = PAGE.read_text()
    assert with_table(page) == page


def test_a_family_without_a_config_is_named() -> None:
    llama = Family("LlamaForCausalLM", ("full",), True, True)
    (line,) = [line for line in _lines([llama]) if line.startswith("Served, but not")]
    assert "`Qwen3ForCausalLM`" in line and "Llama" not in line


def test_a_family_without_a_description_has_a_line() -> None:
    family = Family("SomeForCausalLM", ("window", "full"), False, False)
    assert family.line == "| `SomeForCausalLM` |  | window, full | module by module | no |"
