"""The plain answers at the top of the page, and the table of counters at its end."""

from __future__ import annotations

from dspark.calibrate.fit import ALLOWED_ERROR
from dspark.report.acceptance import CLASS_WORDS
from dspark.report.model import Column as C
from dspark.report.model import Section, Table, Value, Verdict
from dspark.report.source import Observed
from dspark.report.sums import against_full, against_plain, calibrations, ceiling, identities, ratio

_NOTHING = "No decode step was counted."
_LITTLE = 0.005  # a difference that is none
LEAST_DRAFTS = 2000  # of a class: with fewer, the error itself is known no better than what is allowed


def speculation(observed: Observed) -> Verdict:
    """Whether drafting is faster than plain decoding."""
    sums = observed.counters
    ask = {"id": "speculation", "question": "Does speculation pay?"}
    if not sums["request_steps"]:
        return Verdict(**ask, answer="not known", words=_NOTHING)
    each = sums["committed"] / sums["request_steps"]
    off = sums["steps"]["draft_off"]
    left_out = f" The draft was left out in {off:,} of {off + sums['steps']['drafted']:,} steps." if off else ""
    speed = against_plain(observed)
    if speed is None:
        if 2 * sums["reasons"].get("draft off", 0) > off + sums["steps"]["drafted"]:
            words = f"The scheduler knows what plain decoding takes, and drafted rarely.{left_out}"
            return Verdict(**ask, answer="no", words=words)
        return Verdict(
            **ask,
            answer="not known",
            words=f"A request step commits {each:.2f} tokens, so it pays while a step takes less than {each:.2f} times "
            f"as long as one of plain decoding. What that takes is not known here: no records file holds it, and a "
            f"server knows it from a measured cost table only.{left_out}",
        )
    return Verdict(
        **ask,
        answer="yes" if speed.ratio > 1 + _LITTLE else "no",
        words=f"{speed.measured:,.1f} tokens per second were measured over {speed.steps:,} steps, {speed.ratio:.2f} "
        f"times the {speed.other:,.1f} predicted for plain decoding of the same batches. A request step commits "
        f"{each:.2f} tokens.{left_out}",
    )


def trimming(observed: Observed) -> Verdict:
    """Whether trimmed windows are faster than full ones."""
    sums = observed.counters
    ask = {"id": "trimming", "question": "Does trimming pay?"}
    if not sums["request_steps"]:
        return Verdict(**ask, answer="not known", words=_NOTHING)
    if not sums["trimmed"]:
        why = "static mode never does" if observed.mode == "static" else "full windows were the best budget, or a pin's"
        return Verdict(**ask, answer="not known", words=f"Nothing was trimmed: {why}.")
    left_out = f"{sums['trimmed'] / sums['proposed']:.0%} of all drafts were left out of their windows"
    found = ceiling(observed)
    kept = "" if found is None else f", {found.committed / found.middle:.1%} of the tokens of full windows were kept"
    if observed.mode == "cap-accept":
        words = f"{left_out}{kept}; time says nothing, since cap-accept forwards full windows."
        return Verdict(**ask, answer="not known", words=words)
    speed = against_full(observed)
    if speed is None:
        words = f"{left_out}{kept}. What full windows would take is not known here: a server with graphs knows it."
        return Verdict(**ask, answer="not known", words=words)
    guessed = "" if found is not None else "roughly "
    better, worse = speed.measured / speed.other_high > 1 + _LITTLE, speed.measured / speed.other_low < 1 - _LITTLE
    answer = "yes" if better else "no" if worse else "not known"
    return Verdict(
        **ask,
        answer=answer,  # type: ignore[arg-type]
        words=f"{left_out}{kept}. {speed.measured:,.1f} tokens per second were measured over {speed.steps:,} steps, "
        f"{speed.ratio:.2f} times the {guessed}{speed.other:,.1f} predicted for full windows.",
    )


def calibration(observed: Observed) -> Verdict:
    """Whether confidences mean what they say."""
    ask = {"id": "calibration", "question": "Are confidences calibrated?"}
    found = [one for one in calibrations(observed) if one.excess is not None]
    if not found:
        words = "No confidence was held against an outcome: static mode without a table sends none to the host."
        return Verdict(**ask, answer="not known", words=words)
    said = []
    for one in found:
        assert one.excess is not None
        off = one.predicted / one.accepted - 1 if one.accepted else None
        much = "none came" if off is None else f"{abs(off):.0%} {'more' if off > 0 else 'less'} was promised than came"
        name = CLASS_WORDS[one.name]
        said.append(f"{name}: error {one.excess:+.1%} over the noise floor, {much}, {one.judged:,} drafts")
    theta = (observed.schedule.get("trust") or {}).get("theta")
    believed = (
        "" if theta is None else f" The scheduler takes survivals to the power {theta:.2f}, as steps have taught it."
    )
    telling = [one.calibrated for one in found if one.judged >= LEAST_DRAFTS]
    few = "" if len(telling) == len(found) else f" Fewer than {LEAST_DRAFTS:,} drafts decide nothing."
    return Verdict(
        **ask,
        answer="not known" if not telling else "yes" if all(telling) else "no",
        words=f"{'; '.join(said)}. Allowed: {ALLOWED_ERROR:.0%} over the floor.{few}{believed}",
    )


def counters(observed: Observed) -> Section:
    """All sums, and whether their identities hold."""
    sums = observed.counters
    rows: list[list[Value]] = [[name, value] for name, value in sums.items() if isinstance(value, int)]
    rows += [[f"{name}: {key}", count] for name in ("steps", "ceiling") for key, count in sums[name].items()]
    ratios: list[list[Value]] = [
        ["drafts tested, of those proposed", ratio(sums["tested"], sums["proposed"])],
        ["drafts accepted, of those tested", ratio(sums["accepted"], sums["tested"])],
        ["rows per request step", ratio(sums["rows"], sums["request_steps"])],
        ["tokens committed per request step", ratio(sums["committed"], sums["request_steps"])],
    ]
    checks = identities(observed)
    broken = [name for name, left, right in checks if left != right]
    words = [f"NOT holding: {'; '.join(broken)}. Please report it." if broken else "All identities hold."]
    if any(left is None for _, left, _ in checks):
        words.append("A records file does not say where committed tokens went.")
    relay = observed.schedule.get("relay") or {}
    rows += [[f"confidences: {name}", count] for name, count in relay.items()]
    if "late_confidences" in observed.schedule:
        rows.append(["late confidences", observed.schedule["late_confidences"]])
    return Section(
        id="counters",
        title="Counters",
        words=words,
        tables=[
            Table(
                id="identities",
                title="Identities",
                columns=[
                    C(name="identity", unit="text"),
                    C(name="left", unit="count"),
                    C(name="right", unit="count"),
                    C(name="holds", unit="text"),
                ],
                rows=[
                    [name, left, right, "not recorded" if left is None else "yes" if left == right else "NO"]
                    for name, left, right in checks
                ],
            ),
            Table(
                id="ratios",
                title="Ratios",
                columns=[C(name="what", unit="text"), C(name="ratio")],
                rows=ratios,
            ),
            Table(
                id="sums",
                title="Sums",
                columns=[C(name="counter", unit="text"), C(name="count", unit="count")],
                rows=rows,
            ),
        ],
    )
