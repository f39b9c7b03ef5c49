//! The terminal while an answer is written to it.

/// For as long as this lives, the terminal does not show what is typed, so that it does not end
/// up in the middle of an answer. Lines typed meanwhile wait for the next prompt; Ctrl-C works.
pub struct HiddenTyping {
    #[cfg(unix)]
    before: Option<rustix::termios::Termios>,
}

#[cfg(unix)]
impl HiddenTyping {
    /// Does nothing where standard input is no terminal.
    pub fn start() -> HiddenTyping {
        use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
        let input = std::io::stdin();
        let before = tcgetattr(&input).ok().filter(|before| {
            let mut hidden = before.clone();
            hidden.local_modes.remove(LocalModes::ECHO);
            tcsetattr(&input, OptionalActions::Now, &hidden).is_ok()
        });
        HiddenTyping { before }
    }
}

#[cfg(unix)]
impl Drop for HiddenTyping {
    fn drop(&mut self) {
        use rustix::termios::{OptionalActions, tcsetattr};
        if let Some(before) = &self.before {
            // A terminal that has gone needs no setting back.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

#[cfg(not(unix))]
impl HiddenTyping {
    pub fn start() -> HiddenTyping {
        HiddenTyping {}
    }
}
