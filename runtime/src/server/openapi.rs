use serde_json::{Value, json};
pub(super) fn document() -> Value {
    json!({})
}
