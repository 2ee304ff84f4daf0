"""Known vulnerabilities of the exact versions in constraints.txt, by pip-audit.

Exit code 0: none. 1: some. 2: NOT CHECKED, because the database was not reached or lacks packages: no pass.
"""

import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def verdict(text: str, error: str = "") -> tuple[int, str]:
    """Exit code and message for the JSON that pip-audit printed, or its error if that is none."""
    try:
        packages = json.loads(text)["dependencies"]
    except (ValueError, KeyError):
        return (
            2,
            f"NOT CHECKED: {error.strip().splitlines()[-1] if error.strip() else 'no answer of pip-audit'}",
        )
    found = [
        f"{package['name']} {package['version']}: {', '.join([one['id'], *one['aliases']])}; "
        f"fixed in {', '.join(one['fix_versions']) or 'no version'}"
        for package in packages
        for one in package.get("vulns", ())
    ]
    skipped = [package["skip_reason"] for package in packages if "skip_reason" in package]
    lines = [f"{len(packages) - len(skipped)} packages checked, {len(found)} known vulnerabilities", *found]
    if skipped:
        lines.append(f"NOT CHECKED: {len(skipped)} of {len(packages)} packages. {skipped[0]}")
    return 1 if found else 2 if skipped else 0, "\n".join(lines)


def main() -> None:
    """Audit the constraints."""
    options = ["--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", *options, "--requirement", str(CONSTRAINTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    code, message = verdict(done.stdout, done.stderr)
    print(message)
    sys.exit(code)


if __name__ == "__main__":
    main()
