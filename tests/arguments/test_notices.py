"""Warnings to callers: whom they name, how often they come, and how they are silenced."""

import warnings

import pytest
import torch

import nvalchemiops
from nvalchemiops.notices import AccuracyWarning, NeighborListWarning, is_first, notify, unsaid


def called(message, **options):
    notify(message, AccuracyWarning, **options)


def shown(action, calls):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        calls()
    return found


def test_a_line_of_the_caller_is_warned_once_even_if_others_touch_the_filters():
    def calls():
        for n in range(3):
            called(f"error {n}", kind="errors of this test")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")

    (only,) = shown("default", calls)
    assert only.filename == __file__ and str(only.message) == "error 0" and only.category is AccuracyWarning


def test_other_lines_and_other_kinds_are_others():
    def calls():
        for _ in range(2):
            notify("one", AccuracyWarning)
            notify("one", AccuracyWarning)
            notify("two", AccuracyWarning)

    assert [str(w.message) for w in shown("default", calls)] == ["one", "one", "two"]


def test_filters_of_the_caller_are_obeyed():
    def calls():
        for _ in range(3):
            called("again")

    assert len(shown("always", calls)) == 3
    assert not shown("ignore", calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(AccuracyWarning, match="again"):
                called("again")


def test_one_line_silences_all():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", nvalchemiops.NvalchemiopsWarning)
        for category in (nvalchemiops.AccuracyWarning, nvalchemiops.NeighborListWarning, NeighborListWarning):
            notify("silent", category)
    assert not found


def test_what_was_ignored_once_is_shown_later():
    def calls():
        notify("later", AccuracyWarning)

    assert not shown("ignore", calls) and len(shown("default", calls)) == 1


def test_checks_are_made_as_often_as_a_warning_would_be_shown():
    made = []

    def calls():
        for n in (1, 1, 2, 1):
            made.append(is_first(AccuracyWarning, "a check", n))

    assert not shown("ignore", calls) and not any(made)
    with unsaid():
        assert not is_first(AccuracyWarning, "a check", 3)
    for action, due in (("default", [True, False, True, False]), ("default", [False] * 4), ("error", [True] * 4)):
        made.clear()
        shown(action, calls)
        assert made == due


def test_a_call_of_a_module_is_a_line_of_the_caller():
    """Not one of torch, which calls its `forward`."""
    ours = {"notify": notify, "category": AccuracyWarning, "torch": torch, "__name__": "nvalchemiops.of_this_test"}
    text = """
class Module(torch.nn.Module):
    def forward(self):
        notify("in a module", category)
"""
    exec(text, ours)
    module = ours["Module"]()
    (only,) = shown("default", lambda: module())
    assert only.filename == __file__
