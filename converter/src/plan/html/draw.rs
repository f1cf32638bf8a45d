//! The page's two drawings, as inline SVG in units of about one pixel.

use super::{Flow, Flows, escape, percent, shown};
use crate::error::human_bytes;
use crate::plan::groups::{Group, GroupBytes};
use formats::Dtype;
use std::fmt::Write;
use std::ops::Range;

const WIDTH: f64 = 1000.0;
/// Left of the bars: the ranks' numbers.
const LEFT: f64 = 64.0;
/// Right of the bars: their sizes.
const RIGHT: f64 = 84.0;

/// A coloured square beside a group's name.
pub(super) fn swatch(group: Group) -> String {
    format!(
        "<svg viewBox=\"0 0 12 12\" aria-hidden=\"true\"><rect class=\"g{}\" width=\"12\" height=\"12\" rx=\"2\"/></svg>",
        group as usize
    )
}

/// A bar for each rank, from 26 units for a few ranks down to 1 for a thousand.
pub(super) fn memory_map(page: &mut String, ranks: &[GroupBytes]) {
    const TOP: f64 = 26.0;
    const TALLEST: f64 = 900.0;
    let sizes: Vec<u64> = ranks.iter().map(|rank| rank.iter().sum()).collect();
    let most = sizes.iter().copied().max().unwrap_or(0).max(1);
    let row = (TALLEST / ranks.len() as f64).clamp(1.0, 26.0);
    let bar = if row >= 4.0 { row * 0.78 } else { row };
    let height = TOP + row * ranks.len() as f64 + 8.0;
    let scale = (WIDTH - LEFT - RIGHT) / most as f64;
    let groups = shown(ranks);
    let _ = writeln!(
        page,
        "<svg class=\"ranks\" viewBox=\"0 0 {WIDTH} {height:.1}\" role=\"img\" aria-label=\"Bytes of each rank by group\">"
    );
    for tick in ticks(most) {
        let x = LEFT + tick as f64 * scale;
        let _ = writeln!(
            page,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"18\" x2=\"{x:.1}\" y2=\"{height:.1}\"/><text class=\"dim m\" x=\"{x:.1}\" y=\"12\">{}</text>",
            round_bytes(tick)
        );
    }
    // Every so many ranks that numbers do not touch.
    let every = (0..).map(|power| 1usize << power).find(|&n| n as f64 * row >= 15.0).unwrap_or(1);
    for (rank, bytes) in ranks.iter().enumerate() {
        let y = TOP + row * rank as f64;
        let mut before = 0;
        for &group in &groups {
            let own = bytes[group as usize];
            if own == 0 {
                continue;
            }
            let _ = writeln!(
                page,
                "<rect class=\"s g{}\" x=\"{:.3}\" y=\"{y:.2}\" width=\"{:.6}\" height=\"{bar:.2}\"><title>rank {rank}, {}: {} ({})</title></rect>",
                group as usize,
                LEFT + before as f64 * scale,
                own as f64 * scale,
                group.label(),
                human_bytes(own),
                percent(own, sizes[rank])
            );
            before += own;
        }
        if rank.is_multiple_of(every) {
            let base = y + bar / 2.0 + 4.5;
            let _ = writeln!(
                page,
                "<text class=\"dim r\" x=\"{:.1}\" y=\"{base:.1}\">{rank}</text><text class=\"dim\" x=\"{:.1}\" y=\"{base:.1}\">{}</text>",
                LEFT - 10.0,
                LEFT + sizes[rank] as f64 * scale + 8.0,
                human_bytes(sizes[rank])
            );
        }
    }
    let mean = sizes.iter().sum::<u64>() as f64 / sizes.len().max(1) as f64;
    if sizes.iter().any(|&size| size != most) {
        let x = LEFT + mean * scale;
        let _ = writeln!(
            page,
            "<line class=\"mean\" x1=\"{x:.1}\" y1=\"18\" x2=\"{x:.1}\" y2=\"{height:.1}\"><title>mean: {}</title></line>",
            human_bytes(mean as u64)
        );
    }
    page.push_str("</svg>\n");
}

/// Round numbers of bytes from 0 up to at most `most`, about five of them.
fn ticks(most: u64) -> impl Iterator<Item = u64> {
    let rough = most as f64 / 5.0;
    let power = 10f64.powf(rough.max(1.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|&n| n >= rough).unwrap_or(rough);
    (0..=most).step_by((step as usize).max(1))
}

/// `20 GB`, without digits that a round number does not need.
fn round_bytes(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0 => return "0".to_owned(),
        1..1_000 => (1, "B"),
        1_000..1_000_000 => (1_000, "kB"),
        1_000_000..1_000_000_000 => (1_000_000, "MB"),
        _ => (1_000_000_000, "GB"),
    };
    format!("{} {name}", bytes as f64 / unit as f64)
}

/// A type on one side of the drawing, and where its bar is.
struct Node {
    dtype: Dtype,
    bytes: u64,
    y: f64,
    height: f64,
    /// How far its bands have come.
    used: f64,
}

/// Types of the source, bands as thick as their bytes, types of the checkpoint.
pub(super) fn types(page: &mut String, flows: &Flows) {
    const TALL: f64 = 300.0;
    const BAR: f64 = 12.0;
    let x: Range<f64> = 250.0..750.0;
    let side = |of: fn(&(Dtype, Dtype)) -> Dtype, bytes: fn(&Flow) -> u64| {
        let mut nodes: Vec<(Dtype, u64)> = Vec::new();
        for (key, flow) in flows {
            match nodes.iter_mut().find(|(dtype, _)| *dtype == of(key)) {
                Some((_, sum)) => *sum += bytes(flow),
                None => nodes.push((of(key), bytes(flow))),
            }
        }
        nodes.sort_by_key(|&(dtype, bytes)| (std::cmp::Reverse(bytes), dtype));
        nodes
    };
    let (from, to) =
        (side(|key| key.0, |flow| flow.source_bytes), side(|key| key.1, |flow| flow.stored_bytes));
    let sum = |nodes: &[(Dtype, u64)]| nodes.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let (source_bytes, stored_bytes) = (sum(&from), sum(&to));
    let scale = TALL / source_bytes.max(stored_bytes).max(1) as f64;
    let (mut from, mut to) = (place(&from, scale), place(&to, scale));
    let end = |nodes: &[Node]| nodes.last().map_or(0.0, |node| node.y + node.height.max(LINE));
    let height = end(&from).max(end(&to)) + 6.0;
    let _ = writeln!(
        page,
        "<svg class=\"types\" viewBox=\"0 0 {WIDTH} {height:.1}\" role=\"img\" aria-label=\"Bytes by type in the source and in the checkpoint\">\n\
         <text class=\"dim r\" x=\"{:.1}\" y=\"14\">source: {}</text><text class=\"dim\" x=\"{:.1}\" y=\"14\">checkpoint: {}</text>",
        x.start + BAR,
        human_bytes(source_bytes),
        x.end - BAR,
        human_bytes(stored_bytes)
    );
    let order: Vec<Dtype> = from.iter().map(|node| node.dtype).collect();
    let mut bands: Vec<(&(Dtype, Dtype), &Flow)> = flows.iter().collect();
    let rank = |nodes: &[Node], dtype| nodes.iter().position(|node| node.dtype == dtype);
    bands.sort_by_key(|((a, b), _)| (rank(&from, *a), rank(&to, *b)));
    for ((a, b), flow) in bands {
        let (Some(left), Some(right)) = (rank(&from, *a), rank(&to, *b)) else { continue };
        let (l, r) = (&mut from[left], &mut to[right]);
        let (lh, rh) = (flow.source_bytes as f64 * scale, flow.stored_bytes as f64 * scale);
        let (ly, ry) = (l.y + l.used, r.y + r.used);
        l.used += lh;
        r.used += rh;
        let (x0, x1) = (x.start + BAR, x.end - BAR);
        let middle = (x0 + x1) / 2.0;
        // Thin bands would not be seen.
        let (lh, rh) = (lh.max(1.0), rh.max(1.0));
        let _ = writeln!(
            page,
            "<path class=\"band g{}\" d=\"M{x0:.1} {ly:.2}C{middle:.1} {ly:.2} {middle:.1} {ry:.2} {x1:.1} {ry:.2}V{:.2}C{middle:.1} {:.2} {middle:.1} {:.2} {x0:.1} {:.2}Z\"><title>{} to {}: {} tensors, {} in the source, {} stored</title></path>",
            colour(order.iter().position(|dtype| dtype == a).unwrap_or(0)),
            ry + rh,
            ry + rh,
            ly + lh,
            ly + lh,
            escape(a.name()),
            escape(b.name()),
            flow.tensors,
            human_bytes(flow.source_bytes),
            human_bytes(flow.stored_bytes)
        );
    }
    for (nodes, bar_x, label_x, class) in
        [(&from, x.start, x.start - 10.0, " class=\"r\""), (&to, x.end - BAR, x.end + 10.0, "")]
    {
        for node in nodes {
            let _ = writeln!(
                page,
                "<rect class=\"node\" x=\"{bar_x:.1}\" y=\"{:.2}\" width=\"{BAR}\" height=\"{:.2}\"/><text{class} x=\"{label_x:.1}\" y=\"{:.1}\">{} <tspan class=\"dim\">{}</tspan></text>",
                node.y,
                node.height,
                node.y + node.height.max(9.0) / 2.0 + 4.5,
                escape(node.dtype.name()),
                human_bytes(node.bytes)
            );
        }
    }
    page.push_str("</svg>\n");
}

/// Height that a label needs.
const LINE: f64 = 18.0;

fn place(nodes: &[(Dtype, u64)], scale: f64) -> Vec<Node> {
    let mut y = 26.0;
    nodes
        .iter()
        .map(|&(dtype, bytes)| {
            let height = (bytes as f64 * scale).max(1.0);
            let node = Node { dtype, bytes, y, height, used: 0.0 };
            y += height.max(LINE - 8.0) + 8.0;
            node
        })
        .collect()
}

/// Neighbours in the drawing in colours that differ; the groups' own colours are used again, grey left out.
fn colour(index: usize) -> usize {
    const ORDER: [usize; 10] = [5, 1, 0, 8, 3, 2, 4, 9, 7, 6];
    ORDER[index % ORDER.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(7_800_000).collect::<Vec<_>>(), [0, 2_000_000, 4_000_000, 6_000_000]);
        for most in [1, 9, 10, 4096, 57_000_000_000, u64::MAX / 4] {
            let ticks: Vec<u64> = ticks(most).collect();
            assert!((1..=11).contains(&ticks.len()), "{most}: {ticks:?}");
        }
        assert_eq!((round_bytes(0), round_bytes(20_000_000_000)), ("0".to_owned(), "20 GB".to_owned()));
    }
}
