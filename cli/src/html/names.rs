//! Layers and kinds of tensors, from their names.

/// Returns the number of a tensor's layer, and its name without numbers: 3 and `layers.*.mlp.up_proj.weight` for
/// `layers.3.mlp.up_proj.weight`. The layer is the first number between dots. Later ones, such as those of experts, become `*`.
pub fn place(name: &str) -> (Option<u32>, String) {
    let mut layer = None;
    let parts = name.split('.').map(|part| match part.parse::<u32>() {
        Ok(number) => {
            layer.get_or_insert(number);
            "*"
        }
        Err(_) => part,
    });
    let name = parts.collect::<Vec<_>>().join(".");
    (layer, name)
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn the_first_number_is_the_layer() {
        assert_eq!(place("model.layers.12.mlp.experts.7.up.weight"), (Some(12), "model.layers.*.mlp.experts.*.up.weight".into()));
        assert_eq!(place("h.0"), (Some(0), "h.*".into()));
        for name in ["embed.weight", "conv2d.weight", "", "x.-1.y", "x.99999999999.y"] {
            assert_eq!(place(name), (None, name.into()));
        }
    }
}
