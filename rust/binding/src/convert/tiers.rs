//! Names of tiers as arguments.

use crate::convert::errors::invalid;
use blockyard_core::Tier;
use pyo3::prelude::*;

/// Returns the tier of that name.
pub(crate) fn tier_of(name: &str) -> PyResult<Tier> {
    tier("tier", name, &Tier::ALL)
}

/// Returns the tier of that name, if it is one of `allowed`; `argument` is for the message.
pub(crate) fn tier(argument: &str, name: &str, allowed: &[Tier]) -> PyResult<Tier> {
    let found = Tier::from_name(name).filter(|tier| allowed.contains(tier));
    found.ok_or_else(|| {
        let names: Vec<_> = allowed.iter().map(|tier| format!("'{}'", tier.name())).collect();
        let (last, rest) = names.split_last().map_or((String::new(), &[][..]), |(last, rest)| (last.clone(), rest));
        invalid(format!("{argument} is '{name}', must be {} or {last}", rest.join(", ")))
    })
}
