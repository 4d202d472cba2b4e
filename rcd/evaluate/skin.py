"""The style and the script of a report's page; nothing in them is taken from a result."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1d2530;--soft:#5b6675;--rule:#dde2e8;--good:#0a7d4f;
--bad:#b3361b;--level:#5b6675;--goodback:#e6f4ee;--badback:#fbebe6;--levelback:#eef1f4;
--c0:#0072b2;--c1:#d55e00;--c2:#00845f;--c3:#b0558a;--c4:#a87400;--c5:#2d8bc4;--c6:#444}
@media(prefers-color-scheme:dark){:root{--paper:#13171c;--card:#1b2128;--ink:#e6eaef;--soft:#9aa6b4;--rule:#303944;
--good:#4cc794;--bad:#ff8f70;--level:#9aa6b4;--goodback:#12301f;--badback:#3a1d15;--levelback:#222a33;
--c0:#5ab4f0;--c1:#ff9a4d;--c2:#3fc79b;--c3:#e39ac3;--c4:#e8b43a;--c5:#8fd0ff;--c6:#ccc}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1000px;padding:1.6rem 1.1rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
h1,h2,.verdict,.legend li{overflow-wrap:anywhere}
h1{font-size:1.55rem;line-height:1.25;margin:0}
h2{font-size:1.15rem;margin:2.6rem 0 .5rem}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
p{margin:.5rem 0}
.soft,figcaption,.note{color:var(--soft);font-size:.92rem}
.verdict{border-left:5px solid var(--level);background:var(--levelback);border-radius:6px;padding:.8rem 1rem;
margin:.9rem 0}
.verdict b{font-size:1.08rem;font-weight:600}
.verdict p{margin:.35rem 0 0}
.verdict.up{border-color:var(--good);background:var(--goodback)}
.verdict.down,.failed{border-color:var(--bad);background:var(--badback)}
.failed{border-left:5px solid var(--bad);border-radius:6px;padding:.7rem 1rem;margin:.9rem 0;overflow-wrap:anywhere}
.failed ul{margin:.3rem 0 0;padding-left:1.2rem}
figure{margin:0}
svg.chart{width:100%;height:auto;display:block}
svg.narrow{display:none}
.chart .grid{stroke:var(--rule);stroke-width:1;fill:none}
.chart .tick,.chart .axis{fill:var(--soft);font-size:12px}
.chart .small{font-size:10.5px;stroke:var(--paper);stroke-width:3px;paint-order:stroke}
.band{opacity:.13;stroke:none}.line{fill:none!important;stroke-width:2.2;stroke-linejoin:round}
.mark{stroke:var(--paper);stroke-width:1}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}.c4{fill:var(--c4)}.c5{fill:var(--c5)}
.c6{fill:var(--c6)}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}.line.c6{stroke:var(--c6)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.3rem;padding:0;margin:.3rem 0 .4rem}
.legend li{display:flex;align-items:center;gap:.35rem;overflow-wrap:anywhere}
.key{width:16px;height:16px;flex:none}
.wide{overflow-x:auto;margin:.4rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.94rem}
.wide table{min-width:min(100%,26rem)}
th,td{padding:.32rem .8rem .32rem 0;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap;
vertical-align:top}
th:first-child,td:first-child{text-align:left}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom;white-space:normal;max-width:12rem}
tr.sum td{font-weight:600;border-bottom:2px solid var(--rule)}
td .ci{color:var(--soft);font-size:.86em;font-weight:400}
.up{color:var(--good)}.down{color:var(--bad)}.level{color:inherit}
.verdict.up,.verdict.down{color:inherit}
svg.bar{width:150px;height:16px;vertical-align:middle}
.bar .zero{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 2}
.bar .reach{stroke:currentColor;stroke-width:2}.bar circle{fill:currentColor}
.bar.level{color:var(--soft)}
pre,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.88rem}
pre.command{background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:.7rem .9rem;
white-space:pre-wrap;overflow-wrap:anywhere;margin:.4rem 0}
table.plain td{white-space:normal;overflow-wrap:anywhere;text-align:left}
table.plain td:first-child{color:var(--soft);white-space:nowrap}
details summary{cursor:pointer;color:var(--soft)}
.bench{display:flex;flex-wrap:wrap;gap:.5rem .9rem;align-items:center;margin:.6rem 0}
.bench select{min-width:0}
.bench label{max-width:100%;display:flex;gap:.4rem;align-items:center}
select,button{font:inherit;font-size:.94rem;color:var(--ink);background:var(--card);border:1px solid var(--rule);
border-radius:6px;padding:.3rem .6rem;max-width:100%}
button:disabled{opacity:.45}
#items{width:100%;table-layout:fixed;font-size:.92rem}
#items td,#items th{text-align:left;white-space:normal;padding:.6rem .8rem .6rem 0;vertical-align:top}
#items .text{white-space:pre-wrap;overflow-wrap:anywhere;max-height:17rem;overflow-y:auto}
#items .grid6{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;letter-spacing:.02em}
#items .who{display:none;font-weight:600}
#items .count{color:var(--soft);font-size:.86rem;margin-bottom:.25rem}
.off{color:var(--bad);font-weight:700}
.badge{font-weight:600}
.badge.right{color:var(--good)}.badge.wrong{color:var(--bad)}
#none{color:var(--soft);padding:1rem 0}
@media(max-width:640px){body{font-size:15px;padding:1.1rem .9rem 3rem}
svg.chart.broad{display:none}svg.narrow{display:block}
.hide{display:none}th,td{padding-right:.5rem;font-size:.9rem}td:first-child{white-space:normal}
td .ci{display:block}td:first-child{min-width:5.2rem}.wide table{min-width:100%}
#items thead{display:none}#items tr{display:block;border-bottom:2px solid var(--rule);padding:.5rem 0}
#items td{display:block;border:0;padding:.3rem 0}#items .who{display:block}}
"""

SCRIPT = """
(function(){
var data=JSON.parse(document.getElementById('data').textContent),page=0,size=20;
var at=document.getElementById('at'),show=document.getElementById('show'),body=document.querySelector('#items tbody');
function make(kind,name,text){var e=document.createElement(kind);if(name)e.className=name;
if(text!==undefined)e.textContent=text;return e}
function counted(n,word){return n+' '+word+(n===1?'':'s')}
function outs(t,i){return data.answers.map(function(e){return e[t]?e[t][i]:null})}
function wanted(t,i){var o=outs(t,i).filter(Boolean),right=o.filter(function(x){return x[1]}).length;
if(show.value==='differ')return right>0&&right<o.length;
if(show.value==='texts')return o.some(function(x){return x[0]!==o[0][0]});
if(show.value==='wrong')return right===0;
return true}
function text(cell,i,words,mark){var item=data.items[i],box=make('div',item.grid?'text grid6':'text');
if(mark&&item.grid)Array.from(words).forEach(function(c,k){
box.appendChild(c===item.answer[k]?document.createTextNode(c):make('span','off',c))});
else box.textContent=words;cell.appendChild(box)}
function draw(){
var t=Number(at.value),rows=[];
for(var i=0;i<data.items.length;i++)if(wanted(t,i))rows.push(i);
var pages=Math.max(1,Math.ceil(rows.length/size));page=Math.min(page,pages-1);
body.textContent='';
rows.slice(page*size,page*size+size).forEach(function(i){
var item=data.items[i],row=make('tr'),first=make('td');
first.appendChild(make('div','count',item.name));text(first,i,item.prompt);row.appendChild(first);
var gold=make('td');gold.appendChild(make('span','who','right answer'));
gold.appendChild(make('div','count hide','\u00a0'));text(gold,i,item.answer);row.appendChild(gold);
outs(t,i).forEach(function(o,k){var cell=make('td');cell.appendChild(make('span','who',data.entries[k]));
if(!o){cell.appendChild(make('div','count','no answer: the point failed'))}else{
var line=make('div','count');line.appendChild(make('span','badge '+(o[1]?'right':'wrong'),o[1]?'✓ right':'✗ wrong'));
line.appendChild(document.createTextNode(' · '+counted(o[2],'token')+' · '+counted(o[3],'step')));
cell.appendChild(line);text(cell,i,data.texts[o[0]]||'(empty)',!o[1]&&data.texts[o[0]]!=='')}
row.appendChild(cell)});body.appendChild(row)});
document.getElementById('none').hidden=rows.length>0;
document.getElementById('where').textContent=rows.length?
(page*size+1)+'–'+Math.min(rows.length,page*size+size)+' of '+rows.length:'0 items';
document.getElementById('back').disabled=page===0;document.getElementById('on').disabled=page>=pages-1}
function turn(by){page+=by;draw();document.getElementById('answers').scrollIntoView()}
at.addEventListener('change',function(){page=0;draw()});show.addEventListener('change',function(){page=0;draw()});
document.getElementById('back').addEventListener('click',function(){turn(-1)});
document.getElementById('on').addEventListener('click',function(){turn(1)});
draw()})();
"""
