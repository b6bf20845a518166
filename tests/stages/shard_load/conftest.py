"""Tests of loading are about what comes after a rehearsal: each model is rehearsed once."""

from tests.rehearsals import rehearses_once as rehearses_once
