//! Tags of blocks that a policy let go, to know them when they come back.

/// One place a tag; a tag is forgotten when another takes its place.
#[derive(Debug, Clone)]
pub(super) struct Ghosts(Vec<u32>);

impl Ghosts {
    pub(super) fn new(places: usize) -> Self {
        Self(vec![0; places])
    }

    /// Remembers a tag; returns the one that had its place, 0 for none.
    pub(super) fn insert(&mut self, tag: u32) -> u32 {
        self.place(tag).map_or(0, |place| std::mem::replace(place, tag))
    }

    /// Forgets a tag; returns whether it was there.
    pub(super) fn take(&mut self, tag: u32) -> bool {
        self.place(tag).is_some_and(|place| *place == tag && std::mem::take(place) != 0)
    }

    fn place(&mut self, tag: u32) -> Option<&mut u32> {
        let at = (u64::from(tag) * self.0.len() as u64) >> 32;
        self.0.get_mut(usize::try_from(at).ok()?)
    }
}
