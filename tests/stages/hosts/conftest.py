"""Hosts are forks of a process that has imported everything, which ends with the tests."""

from tests.e2e.conftest import _ends_servers as _ends_servers
