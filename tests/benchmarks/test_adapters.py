"""The measurement of many adapters, with few of them."""

import sys


def test_it_measures_both_crowds(load_script, monkeypatch, capsys) -> None:
    words = "--adapters 6 --slots 2 --requests 8 --rounds 1 --rank 2 --sequences 4"
    monkeypatch.setattr(sys, "argv", ["adapters", *words.split()])
    load_script("benchmarks.adapters").main()
    printed = capsys.readouterr().out
    assert "all registered is " in printed and "at most 2.0x wanted" in printed
    resident = next(line for line in printed.splitlines() if line.startswith("all resident"))
    assert "0 loads and 0 readings a round" in resident
