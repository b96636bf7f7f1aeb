"""The scripts are run by tests, not collected as modules: they import AIMET under its own name."""

collect_ignore_glob = ["scripts/*"]
