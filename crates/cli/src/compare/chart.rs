//! The report as a drawing: a bar for each server in each group of prompts.

use super::report::{Line, Report, Spread};
use crate::document::escaped;
use std::fmt::Write;

/// Sizes in pixels.
const WIDTH: f64 = 760.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 150.0;
const BAR: f64 = 18.0;
const GAP: f64 = 12.0;
const HEAD: f64 = 34.0;

/// Colours that are told apart by people who see few of them (Okabe and Ito, 2008).
const COLOURS: [&str; 6] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
];

/// The figures that are drawn: a title, the factor to its unit, where it is.
type Panel = (&'static str, f64, fn(&Line) -> Option<Spread>);

/// An SVG file.
pub fn draw(report: &Report) -> String {
    let lines = report.lines();
    let categories = report.categories();
    let names: Vec<String> = report.endpoints().iter().map(|e| e.to_string()).collect();
    let panels: [Panel; 2] = [
        ("decode, tokens/s", 1.0, |line| line.decode_tokens_per_s),
        ("time to first token, ms", 1e3, |line| {
            line.time_to_first_token_s
        }),
    ];
    let group = names.len() as f64 * BAR + GAP;
    let panel = HEAD + categories.len() as f64 * group;
    let legend = names.len() as f64 * 20.0 + 16.0;
    let height = legend + panels.len() as f64 * panel;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"system-ui, sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for (index, name) in names.iter().enumerate() {
        let y = 12.0 + index as f64 * 20.0;
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            colour(index),
            LEFT + 18.0,
            y + 10.0,
            escaped(name)
        );
    }
    for (number, (title, factor, figure)) in panels.iter().enumerate() {
        let top = legend + number as f64 * panel;
        let most = lines.iter().filter_map(|line| Some(figure(line)?.high));
        let most = most.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let scale = (WIDTH - LEFT - RIGHT) / most;
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT}\" y=\"{}\" font-weight=\"600\">{title}</text>",
            top + 20.0
        );
        for (place, line) in lines.iter().enumerate() {
            let group_top = top + HEAD + (place / names.len()) as f64 * group;
            let y = group_top + line.endpoint as f64 * BAR;
            if line.endpoint == 0 {
                let _ = writeln!(
                    svg,
                    "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
                    LEFT - 8.0,
                    group_top + names.len() as f64 * BAR / 2.0 + 4.0,
                    escaped(&line.category)
                );
            }
            bar(
                &mut svg,
                y,
                figure(line),
                scale,
                *factor,
                colour(line.endpoint),
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// A bar as long as the median, a line from quartile to quartile, and the median in words.
fn bar(svg: &mut String, y: f64, spread: Option<Spread>, scale: f64, factor: f64, colour: &str) {
    let Some(Spread { low, median, high }) = spread else {
        let _ = writeln!(
            svg,
            "<text class=\"bar\" x=\"{}\" y=\"{}\" fill=\"#777\">not available</text>",
            LEFT + 4.0,
            y + 13.0
        );
        return;
    };
    let x = |value: f64| LEFT + value * scale;
    let middle = y + BAR / 2.0;
    let _ = writeln!(
        svg,
        "<rect class=\"bar\" x=\"{LEFT}\" y=\"{}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/><path d=\"M{:.1} {middle}H{:.1}\" stroke=\"#222\" stroke-width=\"1.5\"/><text x=\"{:.1}\" y=\"{}\">{:.1}</text>",
        y + 1.0,
        median * scale,
        BAR - 2.0,
        x(low),
        x(high),
        x(high) + 6.0,
        y + 13.0,
        median * factor
    );
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}
