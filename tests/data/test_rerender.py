import ast

import pytest

from peagle.data.rerender import parse_task, python_stubs, render_stub

RUBY = """
##
# You are an expert Ruby programmer, and here is your task.
# # Write a function to count true booleans in the given list.
#
# irb> count_true([true, false, nil], {"a" => 1})
# => 1
# irb> count_true([], {})
# => 0
def count_true(lst, extra)
"""
GO = """package main

import (
	"encoding/json"
)
// Code should be written in Go/Golang
// Write a golang function to check whether the two numbers differ at one bit position only or not.
// Examples:
// >>> differ_At_One_Bit_Pos(13,9)
// >>> True
// >>> differ_At_One_Bit_Pos(15,8)
// >>> False
func differ_At_One_Bit_Pos (a int, b []int) bool {

"""
JAVASCRIPT = """/**
 * * Write a javascript function to remove even characters in a string.
 *
 * > removeEven("true python", null)
 * "pto"
 */
function removeEven(str1, b) {
"""


def test_ruby():
    stub = render_stub(parse_task(RUBY, "ruby"))
    assert stub == (
        "def count_true(lst, extra):\n"
        '    """ Count true booleans in the given list.\n'
        "    >>> count_true([True, False, None], {'a': 1})\n"
        "    1\n"
        "    >>> count_true([], {})\n"
        "    0\n"
        '    """\n'
    )


def test_go_has_type_hints():
    stub = render_stub(parse_task(GO, "go"))
    assert stub.startswith("from typing import List\n\n\ndef differ_at_one_bit_pos(a: int, b: List[int]) -> bool:\n")
    assert '""" Check whether the two numbers differ at one bit position only or not.\n' in stub
    assert ">>> differ_at_one_bit_pos(13, 9)\n    True\n" in stub


def test_no_list_hint_for_tuples():
    stub = render_stub(parse_task(GO.replace("(13,9)", "((1, 3),9)"), "go"))
    assert "def differ_at_one_bit_pos(a, b):" in stub


def test_javascript_names_and_words_in_strings():
    stub = render_stub(parse_task(JAVASCRIPT, "javascript"))
    assert "def remove_even(str1, b):" in stub
    assert ">>> remove_even('true python', None)\n    'pto'\n" in stub


@pytest.mark.parametrize("text", [GO, RUBY, JAVASCRIPT])
def test_a_stub_is_python(text):
    language = {GO: "go", RUBY: "ruby", JAVASCRIPT: "javascript"}[text]
    ast.parse(render_stub(parse_task(text, language)) + "    return None\n")


def test_unreadable_values_are_left_out():
    assert parse_task(RUBY.replace("[true, false, nil]", "Foo.new(1)"), "ruby") is None
    assert parse_task("no signature here", "ruby") is None


def test_one_stub_a_task_from_the_preferred_language():
    rows = [
        ("f:1", {"task_id": "MBRBP/7", "language": "ruby", "prompt": RUBY}),
        ("f:2", {"task_id": "MBGP/7", "language": "go", "prompt": GO}),
        ("f:3", {"task_id": "MBJSP/8", "language": "javascript", "prompt": JAVASCRIPT}),
        ("f:4", {"task_id": "MBPHP/9", "language": "php", "prompt": "<?php"}),
    ]
    stubs = list(python_stubs(rows))
    assert [place for place, _ in stubs] == ["f:2", "f:3"]
