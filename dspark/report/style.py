"""The page's style sheet."""

from __future__ import annotations

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5b6470;--rule:#dfe3e8;--yes:#1a7f37;--no:#b42318;--open:#8a6100;
--s0:#1864ab;--s1:#d9480f;--s2:#2b8a3e;--s3:#862e9c}
@media (prefers-color-scheme:dark){:root{--bg:#12151a;--card:#1b2027;--ink:#e7eaee;--soft:#a3adb9;--rule:#323a45;
--yes:#56d364;--no:#ff8a80;--open:#e3b341;--s0:#6cb6ff;--s1:#ffa261;--s2:#6bd47f;--s3:#d8a6f2}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header,main{max-width:1240px;margin:0 auto;padding:0 16px}
header{padding-top:20px}
h1{font-size:1.5rem;margin:0 0 8px}h2{font-size:1.15rem;margin:0 0 6px}h3{font-size:1rem;margin:0}
p{margin:0 0 6px;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:4px 20px;margin:0 0 16px}
.facts div{min-width:0}.facts dt{color:var(--soft);font-size:.78rem}
.facts dd{margin:0;overflow-wrap:anywhere;font-size:.9rem}
.verdicts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:14px}
.verdict,section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px}
.verdict{border-top:4px solid var(--open)}
.verdict.yes{border-top-color:var(--yes)}.verdict.no{border-top-color:var(--no)}
.answer{font-size:1.3rem;font-weight:650;color:var(--open)}
.yes .answer{color:var(--yes)}.no .answer{color:var(--no)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:14px 0;font-size:.9rem}nav a{color:var(--s0)}
.sections{display:grid;grid-template-columns:minmax(0,1fr);gap:16px;margin-bottom:24px}
@media (min-width:900px){.sections{grid-template-columns:repeat(2,minmax(0,1fr))}section{grid-column:1/-1}
section.half{grid-column:auto}}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:20px;margin:10px 0}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:8px 24px}
figure{margin:0;min-width:0;max-width:560px;display:flex;flex-direction:column}
figcaption p{color:var(--soft);font-size:.88rem}
.chart{width:100%;height:auto;display:block;margin-top:auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:2px 0 4px;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:5px}.swatch{width:12px;height:12px}
svg text{fill:var(--soft);font-size:9.5px}svg .label{font-size:10px;fill:var(--ink)}
.middle{text-anchor:middle}.end{text-anchor:end}
.grid{stroke:var(--rule);stroke-width:.7}.axis{stroke:var(--soft);stroke-width:1}
.diagonal{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:1.5 3;stroke-linecap:round}
.line{fill:none;stroke-width:1.8}.dashed{stroke-dasharray:5 4}
.interval{fill:none;stroke:var(--ink);stroke-width:2}
.mark{fill-opacity:.85}.mark:hover{fill-opacity:1}
.s0{fill:var(--s0);stroke:none}.s1{fill:var(--s1)}.s2{fill:var(--s2)}.s3{fill:var(--s3)}
.line.s0{fill:none;stroke:var(--s0)}.line.s1{fill:none;stroke:var(--s1)}.line.s2{fill:none;stroke:var(--s2)}
.line.s3{fill:none;stroke:var(--s3)}
details{margin-top:8px;min-width:0}summary{cursor:pointer;color:var(--s0);font-size:.88rem}
.scroll{overflow-x:auto;max-height:420px;overflow-y:auto;margin-top:6px}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding-bottom:4px}
th,td{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
th{font-weight:550}tbody th{font-weight:400;white-space:normal;min-width:7em}
.unseen{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
@media (max-width:480px){body{font-size:14px}header,main{padding-left:10px;padding-right:10px}}
"""
