//! Stop strings in streamed text.
//!
//! Text is let through as soon as no stop string can begin in it any more. The result does not
//! depend on how the text was cut into pieces: it is read character by character, the stop
//! string that is complete first wins, and among those complete at once the longest.

/// Watches a stream of text for stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    found: bool,
}

impl StopStrings {
    /// Empty strings are ignored.
    pub fn new(stops: &[String]) -> StopStrings {
        StopStrings {
            stops: stops
                .iter()
                .filter(|stop| !stop.is_empty())
                .cloned()
                .collect(),
            held: String::new(),
            found: false,
        }
    }

    /// Takes `text` and appends to `out` what can no longer be part of a stop string. Returns
    /// whether a stop string is complete; it and everything after it is dropped.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.found {
            return true;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return false;
        }
        for character in text.chars() {
            self.held.push(character);
            let complete = self
                .stops
                .iter()
                .filter(|stop| self.held.ends_with(stop.as_str()));
            if let Some(length) = complete.map(String::len).max() {
                out.push_str(&self.held[..self.held.len() - length]);
                self.held.clear();
                self.found = true;
                return true;
            }
            let start = self.first_possible_start();
            out.push_str(&self.held[..start]);
            self.held.drain(..start);
        }
        false
    }

    /// The stream has ended: appends the text that was held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Where the longest end of the held text that begins a stop string starts.
    fn first_possible_start(&self) -> usize {
        self.held
            .char_indices()
            .map(|(start, _)| start)
            .find(|&start| {
                self.stops
                    .iter()
                    .any(|stop| stop.starts_with(&self.held[start..]))
            })
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut watcher = StopStrings::new(&stops);
        let mut out = String::new();
        for piece in pieces {
            if watcher.push(piece, &mut out) {
                return (out, true);
            }
        }
        watcher.finish(&mut out);
        (out, false)
    }

    /// Every way to cut `text` into three pieces.
    fn for_every_split(text: &str, mut check: impl FnMut([&str; 3])) {
        let cuts: Vec<usize> = text
            .char_indices()
            .map(|(i, _)| i)
            .chain([text.len()])
            .collect();
        for (n, &first) in cuts.iter().enumerate() {
            for &second in &cuts[n..] {
                check([&text[..first], &text[first..second], &text[second..]]);
            }
        }
    }

    #[test]
    fn found_over_every_split() {
        for (stops, text, expected) in [
            (vec!["END"], "one two END three", "one two "),
            (vec!["END"], "EEENEND", "EEEN"),
            (vec!["aab"], "aaab", "a"),
            (vec!["\n\n"], "a\nb\n\nc", "a\nb"),
            (vec!["終わり"], "これで終わりです", "これで"),
            // "b" is complete before "abc".
            (vec!["abc", "b"], "xabc", "xa"),
            // Both are complete at once: the longer takes more away.
            (vec!["c", "abc"], "xabc", "x"),
            (vec!["stop"], "stop", ""),
        ] {
            for_every_split(text, |pieces| {
                assert_eq!(
                    run(&stops, &pieces),
                    (expected.to_string(), true),
                    "{pieces:?}"
                );
            });
        }
    }

    #[test]
    fn text_without_a_stop_string_is_whole_over_every_split() {
        for_every_split("aaabaa ENENE é日本", |pieces| {
            let (text, found) = run(&["aac", "END", "日本語", ""], &pieces);
            assert_eq!((text.as_str(), found), ("aaabaa ENENE é日本", false));
        });
    }

    #[test]
    fn only_what_could_begin_a_stop_string_is_held_back() {
        let mut watcher = StopStrings::new(&["</end>".to_string()]);
        let mut out = String::new();
        watcher.push("text </en", &mut out);
        assert_eq!(out, "text ");
        watcher.push("try <", &mut out);
        assert_eq!(out, "text </entry ");
        watcher.finish(&mut out);
        assert_eq!(out, "text </entry <");
    }

    #[test]
    fn nothing_comes_out_after_the_stop() {
        let mut watcher = StopStrings::new(&["X".to_string()]);
        let mut out = String::new();
        assert!(watcher.push("aXb", &mut out));
        assert!(watcher.push("c", &mut out));
        watcher.finish(&mut out);
        assert_eq!(out, "a");
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            text in "[ab]{0,24}",
            stops in proptest::collection::vec("[ab]{1,4}", 0..4),
            sizes in proptest::collection::vec(1usize..5, 0..24),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut pieces = Vec::new();
            let mut rest = text.as_str();
            for size in sizes {
                let (piece, after) = rest.split_at(size.min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            pieces.push(rest);
            let whole = run(&stops, &[&text]);
            prop_assert_eq!(&whole, &run(&stops, &pieces));
            // The answer never contains a stop string.
            prop_assert!(stops.iter().all(|stop| !whole.0.contains(stop)));
            prop_assert_eq!(whole.1, stops.iter().any(|stop| text.contains(stop)));
        }
    }
}
