"""Tests of the tool-call formats: vectors by format, random cuts, grammars against parsers."""
