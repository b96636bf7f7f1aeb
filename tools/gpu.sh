#!/usr/bin/env bash
# On a machine with a GPU: install from the lock, run the tests marked gpu, run benchmarks/gpu.py; one JSON. At most 8 minutes.
#
#   tools/gpu.sh [RESULT.json]      by default gpu.json
#
# PYTHON names the interpreter (python3). Nothing is installed where its packages are already those of the lock.
# Exit code: that of the tests; the JSON holds it, and the benchmark runs whatever it is.
set -euo pipefail
cd "$(dirname "$0")/.."
result=$(realpath -m "${1:-gpu.json}")
python=${PYTHON:-python3}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONPATH="$PWD"
started=$SECONDS
left() { echo $((480 - (SECONDS - started))); }

if ! "$python" -c 'import torch, onnx, onnxruntime, onnxscript, pytest, hypothesis' 2>/dev/null; then
  [ -d .gpu-venv ] || "$python" -m venv .gpu-venv
  python=$PWD/.gpu-venv/bin/python
  timeout "$(left)" "$python" -m pip install -q -c constraints.txt "torch==$(sed -n 's/^torch==//p' constraints.txt)"
  timeout "$(left)" "$python" -m pip install -q -c constraints.txt -e ".[torch,onnx,analysis,fast]" pytest hypothesis rich
fi
"$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'

log=$(mktemp -d)
tests=0
timeout "$(left)" "$python" -m pytest -q -m gpu tests --junitxml "$log/tests.xml" | tee "$log/tests.txt" || tests=$?
timeout "$(left)" "$python" benchmarks/gpu.py --seconds "$(( $(left) > 60 ? $(left) - 30 : 30 ))" --json "$log/gpu.json"
"$python" - "$log" "$tests" "$((SECONDS - started))" "$result" <<'PY'
import json, pathlib, sys, xml.etree.ElementTree as tree
log, code, seconds, result = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
report = log / "tests.xml"
suite = tree.parse(report).getroot().find("testsuite").attrib if report.exists() else {}
counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
tail = (log / "tests.txt").read_text().splitlines()[-40:]
found = {"seconds": seconds, "tests": {"exit": code, **counts, "tail": tail}, **json.loads((log / "gpu.json").read_text())}
pathlib.Path(result).write_text(json.dumps(found, indent=1))
PY
echo "$result"
exit "$tests"
