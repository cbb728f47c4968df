//! Areas of a treemap. Source: Bruls, Huizing and van Wijk, "Squarified treemaps", 2000.

/// A rectangle, with its upper left corner.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Area {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

/// Divides an area in proportion to weights, which are positive and descend. Rows of tiles are added along the shorter side while
/// that makes the tiles more square.
pub fn squarify(weights: &[f64], area: Area) -> Vec<Area> {
    let (mut tiles, mut rest, mut at) = (Vec::with_capacity(weights.len()), area, 0);
    while at < weights.len() {
        let left: f64 = weights[at..].iter().sum();
        let scale = rest.width * rest.height / left;
        let side = rest.width.min(rest.height);
        let (mut end, mut sum) = (at + 1, weights[at]);
        let worst = |end: usize, sum: f64| {
            let depth = sum * scale / side;
            let ratio = |weight: f64| {
                let length = weight * scale / depth;
                (length / depth).max(depth / length)
            };
            ratio(weights[at]).max(ratio(weights[end - 1]))
        };
        while end < weights.len() && worst(end + 1, sum + weights[end]) <= worst(end, sum) {
            sum += weights[end];
            end += 1;
        }
        let depth = sum * scale / side;
        let mut along = 0.0;
        for weight in &weights[at..end] {
            let length = weight * scale / depth;
            tiles.push(match rest.width <= rest.height {
                true => Area { x: rest.x + along, y: rest.y, width: length, height: depth },
                false => Area { x: rest.x, y: rest.y + along, width: depth, height: length },
            });
            along += length;
        }
        match rest.width <= rest.height {
            true => (rest.y, rest.height) = (rest.y + depth, rest.height - depth),
            false => (rest.x, rest.width) = (rest.x + depth, rest.width - depth),
        }
        at = end;
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fill_the_area_in_proportion() {
        let whole = Area { x: 0.0, y: 0.0, width: 600.0, height: 400.0 };
        for weights in [vec![6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], vec![1.0], vec![1e9, 1.0, 1.0], vec![1.0; 41]] {
            let tiles = squarify(&weights, whole);
            let total: f64 = weights.iter().sum();
            for (tile, weight) in tiles.iter().zip(&weights) {
                assert!((tile.width * tile.height - weight / total * 240_000.0).abs() < 1e-3, "{tile:?}");
                assert!(tile.x >= -1e-6 && tile.x + tile.width <= 600.0 + 1e-6);
                assert!(tile.y >= -1e-6 && tile.y + tile.height <= 400.0 + 1e-6);
            }
            for (i, a) in tiles.iter().enumerate() {
                for b in &tiles[..i] {
                    let wide = (a.x + a.width).min(b.x + b.width) - a.x.max(b.x);
                    let high = (a.y + a.height).min(b.y + b.height) - a.y.max(b.y);
                    assert!(wide < 1e-6 || high < 1e-6, "{a:?} and {b:?}");
                }
            }
        }
        // The example of the paper: the first column has two tiles of 3 by 2, in an area of 6 by 4.
        let small = Area { width: 6.0, height: 4.0, ..whole };
        let tiles = squarify(&[6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], small);
        assert_eq!((tiles[0].width, tiles[0].height, tiles[1].y), (3.0, 2.0, 2.0));
    }
}
