//! Ctrl-C ends the answer; pressed again before the answer has ended, it ends the program.

use crate::failure::Failure;
use signal_hook::consts::SIGINT;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether Ctrl-C was pressed.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on Ctrl-C sets a flag.
    pub fn listen() -> Result<Interrupt, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        // In this order: the first press finds the flag unset and sets it.
        signal_hook::flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(SIGINT, Arc::clone(&flag)))
            .map_err(|error| Failure::Failed(format!("cannot listen for Ctrl-C: {error}")))?;
        Ok(Interrupt(flag))
    }

    /// The flag.
    pub fn flag(&self) -> &AtomicBool {
        &self.0
    }

    /// Whether it was pressed.
    pub fn pressed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Makes ready for the next answer.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
