//! `/v1/models`, and what models like this cannot do.

use crate::app::App;
use crate::error::ApiError;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;

fn object(app: &App) -> Value {
    json!({
        "id": app.served.id,
        "object": "model",
        "created": app.served.created,
        "owned_by": "kozue",
        "max_model_len": app.served.context,
    })
}

/// The list, which has one entry.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [object(&app)]}))
}

/// One by its name.
pub async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|error| ApiError::field("model", error.body_text()))?;
    app.served.check_name(Some(&id))?;
    Ok(Json(object(&app)))
}

/// Language models make no embeddings.
pub async fn embeddings(State(app): State<Arc<App>>) -> ApiError {
    let message = format!(
        "{:?} is a language model and makes no embeddings: use a model that was trained for them",
        app.served.id
    );
    ApiError {
        param: Some("model".to_string()),
        ..ApiError::new(StatusCode::BAD_REQUEST, message)
    }
    .code("model_not_supported")
}
