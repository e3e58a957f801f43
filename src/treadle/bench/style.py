"""Style of the page: light and dark, wide and narrow. A target has a colour and a dash; no meaning depends on colour
alone."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f8;--card:#fff;--ink:#1b2026;--soft:#59626d;--line:#d8dde3;--grid:#e7eaee;
--good:#0a6637;--good-bg:#e2f4e9;--bad:#a01d18;--bad-bg:#fbe8e6;--even:#4d5661;--even-bg:#eceff2;
--wait:#dfe3e8;--first:#e6a23c;--stream:#3b7fc4;--refused:#6d4bb0;--failed:#c8281f;--incomplete:#b3570b;--left:#5d6670;
--c0:#0b62b0;--c1:#c2410c;--c2:#0b7f5c;--c3:#a3277f;--c4:#7a5c00;--c5:#0782a3;--c6:#6440b5;--c7:#4a5562}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2126;--ink:#e7eaee;--soft:#a3adb8;--line:#363d46;
--grid:#2a3038;--good:#7ddba4;--good-bg:#12371f;--bad:#ff9f97;--bad-bg:#47191a;--even:#b7c0ca;--even-bg:#2b3139;
--wait:#3a424c;--first:#d9962f;--stream:#5b9fe0;--refused:#b79bf2;--failed:#ff7a70;--incomplete:#f0a35e;--left:#b0b9c3;
--c0:#6db3f7;--c1:#ff9a66;--c2:#55cfa3;--c3:#f08fd2;--c4:#e0bf4f;--c5:#5fd0ec;--c6:#b8a0ff;--c7:#c1cad4}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:1.6rem;margin:0 0 2px}h2{font-size:1.25rem;margin:0 0 2px;overflow-wrap:anywhere}
h3{font-size:1rem;margin:20px 0 6px}
p{margin:4px 0}.soft,figcaption small,dt{color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:18px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:10px 0}
dd{margin:0;overflow-wrap:anywhere}
code{font:13px/1.4 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:10px 0}
table{border-collapse:separate;border-spacing:0;font-variant-numeric:tabular-nums;min-width:50%}
th,td{padding:5px 14px 5px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}
thead th{border-bottom:1px solid var(--line);max-width:18rem;overflow-wrap:anywhere;min-width:8.5rem}
tbody th{font-weight:500;position:sticky;left:0;background:var(--card);min-width:7.5rem}
tbody th a{color:inherit}
.cell b,.cell small,.chip{white-space:nowrap}.cell b{font-weight:500}
.glance th[scope=row]{display:table-cell;white-space:nowrap}.glance th small{float:right;color:var(--soft);
padding-left:20px;font-weight:400}.glance td,.glance tbody th{border-bottom:0}
.glance tr.begins>*{border-top:1px solid var(--line)}
td small{color:var(--soft);font-size:.82rem}
.targets td{overflow-wrap:anywhere;min-width:4rem}.targets td.name{min-width:9rem;max-width:20rem}
.targets code{display:block;min-width:11.5rem}
.chip{display:inline-block;border-radius:5px;padding:0 6px;font-size:.82rem;font-weight:600;margin-right:6px}
.better{color:var(--good);background:var(--good-bg)}.worse{color:var(--bad);background:var(--bad-bg)}
.even{color:var(--even);background:var(--even-bg)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px 26px;margin-top:12px}
figure{margin:0;min-width:0;max-width:640px}figcaption{font-weight:600;overflow-wrap:anywhere}
figcaption small{display:block;font-weight:400;font-size:.85rem}
.legend{display:flex;flex-wrap:wrap;gap:3px 18px;list-style:none;margin:8px 0 0;padding:0;font-size:.9rem}
.legend li{overflow-wrap:anywhere;min-width:0}.swatch{width:30px;height:12px;vertical-align:-1px;margin-right:6px}
.remarks{margin:8px 0 0;padding-left:18px;font-size:.9rem;overflow-wrap:anywhere}
.ending{color:var(--bad);background:var(--bad-bg);border-radius:10px;padding:12px 20px;margin:18px 0;
font-weight:600;overflow-wrap:anywhere}
details{margin-top:10px}summary{cursor:pointer}
svg{display:block;width:100%;height:auto}svg.swatch{display:inline-block}
svg text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--soft)}
svg text.axis{fill:var(--ink)}svg text.tiny{font-size:11.5px}
.grid{stroke:var(--grid);fill:none}.frame{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.whisker{fill:none;stroke-width:1.3;opacity:.75}
.wait{fill:var(--wait)}.first{fill:var(--first)}.stream{fill:var(--stream)}
.mark{fill:none;stroke-width:1.8}
.first.refused{fill:var(--refused)}.first.failed{fill:var(--failed)}.first.incomplete{fill:var(--incomplete)}
.first.left{fill:var(--left)}
.mark.refused{stroke:var(--refused);fill:var(--card)}.mark.failed{stroke:var(--failed)}
.mark.incomplete{stroke:var(--incomplete);fill:var(--incomplete)}.mark.left{stroke:var(--left);stroke-width:2.4}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}
.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}.s6{stroke:var(--c6)}.s7{stroke:var(--c7)}
.line.s1{stroke-dasharray:8 4}.line.s2{stroke-dasharray:2.5 3}.line.s3{stroke-dasharray:10 3 2.5 3}
.line.s4{stroke-dasharray:14 4}.line.s5{stroke-dasharray:5 2.5}.line.s6{stroke-dasharray:8 3 2 3 2 3}
.line.s7{stroke-dasharray:1.5 2}
.dots{fill:var(--card);stroke-width:2}
@media(max-width:560px){main{padding:14px 10px 40px}section{padding:14px 12px}dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:6px}th,td{padding-right:9px}.glance th[scope=row]{white-space:normal}
tbody th{min-width:5.2rem;font-size:.87rem}
.glance th small{float:none;display:block;padding:0}thead th{min-width:6.5rem}.swatch{width:24px}
svg text{font-size:17px}svg text.tiny{font-size:13px}.line{stroke-width:3}}
@media print{section{break-inside:avoid;border:0}}
"""
