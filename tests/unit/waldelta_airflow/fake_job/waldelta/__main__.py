"""A job that tells what it was given and ends as FAKE_JOB says (a JSON document of what to do)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

plan = json.loads(os.environ.get("FAKE_JOB", "{}"))
options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[3:])
seen = {
    "argv": sys.argv[1:],
    "environment": {
        k: v for k, v in os.environ.items() if k.startswith(("AIRFLOW_", "SPARK_", "WALDELTA_"))
    },
    "pid": os.getpid(),
}
if "WALDELTA_WITHOUT_SPARK" in os.environ and not plan.get("small"):
    sys.exit(75)
if "tell" in plan:
    Path(plan["tell"]).write_text(json.dumps(seen))
for line in plan.get("lines", []):
    print(line, file=sys.stderr if line.startswith("stderr") else sys.stdout)
if "sleep_s" in plan:
    if plan.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(plan["started"]).write_text(f"{os.getpid()} {grandchild.pid}")
    time.sleep(plan["sleep_s"])
if "signal" in plan:
    os.kill(os.getpid(), plan["signal"])
if "result" in plan:
    Path(options["result"]).write_text(json.dumps(plan["result"]))
sys.exit(plan.get("exit", 0))
